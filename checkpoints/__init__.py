"""Weights, configurations, tokenizers and sampling defaults: from Hugging Face and Orbax directories, and to Orbax.

Names are imported when they are first used: `import checkpoints` imports neither JAX nor Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.config_json import GenerationConfig
    from checkpoints.conversion import convert
    from checkpoints.errors import CheckpointError
    from checkpoints.export import save_hugging_face
    from checkpoints.load import generation_config, load_config, load_model
    from checkpoints.orbax import restore_orbax, save_orbax
    from checkpoints.resolve import Reference, ReferenceKind
    from checkpoints.text.chat import ChatTemplateError
    from checkpoints.text.stream import StreamDecoder
    from checkpoints.tokenizer import Tokenizer, load_tokenizer, require_tokenizer

_NAMES = {
    "config_json": ("GenerationConfig",),
    "conversion": ("convert",),
    "errors": ("CheckpointError",),
    "export": ("save_hugging_face",),
    "load": ("generation_config", "load_config", "load_model"),
    "orbax": ("restore_orbax", "save_orbax"),
    "resolve": ("Reference", "ReferenceKind"),
    "text.chat": ("ChatTemplateError",),
    "text.stream": ("StreamDecoder",),
    "tokenizer": ("Tokenizer", "load_tokenizer", "require_tokenizer"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"checkpoints.{_MODULES[name]}"), name)
