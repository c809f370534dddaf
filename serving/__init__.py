"""The engine and everything that a person or a client touches.

`from serving import LLM, SamplingParams` is the way in. Importing this package is cheap: JAX is imported when `LLM` is.
"""

from typing import TYPE_CHECKING, Any

from serving.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from serving.engine.async_engine import AsyncEngine
    from serving.engine.llm import LLM
    from serving.engine.output import CompletionOutput, RequestOutput
    from serving.engine.request_error import RequestError
    from serving.engine.sampling_params import SamplingParams

_LAZY = {
    "LLM": "serving.engine.llm",
    "AsyncEngine": "serving.engine.async_engine",
    "CompletionOutput": "serving.engine.output",
    "RequestOutput": "serving.engine.output",
    "RequestError": "serving.engine.request_error",
    "SamplingParams": "serving.engine.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
