"""The engine and its interfaces: Python, HTTP and the command line.

Start with `from serving import LLM, SamplingParams`. Importing this package is cheap: JAX is imported only with `LLM`.
"""

from typing import TYPE_CHECKING, Any

from serving.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from serving.core.errors import RequestError as RequestError
    from serving.engine.async_engine import AsyncEngine as AsyncEngine
    from serving.engine.llm import LLM as LLM
    from serving.engine.requests.adapters import LoRARequest as LoRARequest
    from serving.engine.requests.output import CompletionOutput as CompletionOutput
    from serving.engine.requests.output import RequestOutput as RequestOutput
    from serving.engine.requests.output import unpack_sampling_mask as unpack_sampling_mask
    from serving.engine.requests.sampling_params import SamplingParams as SamplingParams
    from serving.engine.structured.grammars import StructuredOutputsParams as StructuredOutputsParams

_LAZY = {
    "LLM": "serving.engine.llm",
    "AsyncEngine": "serving.engine.async_engine",
    "CompletionOutput": "serving.engine.requests.output",
    "LoRARequest": "serving.engine.requests.adapters",
    "RequestOutput": "serving.engine.requests.output",
    "RequestError": "serving.core.errors",
    "SamplingParams": "serving.engine.requests.sampling_params",
    "StructuredOutputsParams": "serving.engine.structured.grammars",
    "unpack_sampling_mask": "serving.engine.requests.output",
}

__all__ = ["ConfigError", "EngineConfig", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
