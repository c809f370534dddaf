"""Weights, configurations, tokenizers and sampling defaults: from Hugging Face and Orbax directories, and to Orbax.

Names are imported when they are first used: `import checkpoints` imports neither JAX nor Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.conversion import convert
    from checkpoints.errors import CheckpointError
    from checkpoints.export import save_hugging_face
    from checkpoints.generation import GenerationConfig
    from checkpoints.load import generation_config, load_config, load_model
    from checkpoints.orbax import restore_orbax, save_orbax
    from checkpoints.resolve import Reference, ReferenceKind
    from checkpoints.text.chat import ChatTemplateError
    from checkpoints.text.stream import StreamDecoder
    from checkpoints.tokenizer import Tokenizer, load_tokenizer, require_tokenizer

__all__ = [
    "ChatTemplateError",
    "CheckpointError",
    "GenerationConfig",
    "Reference",
    "ReferenceKind",
    "StreamDecoder",
    "Tokenizer",
    "convert",
    "generation_config",
    "load_config",
    "load_model",
    "load_tokenizer",
    "require_tokenizer",
    "restore_orbax",
    "save_hugging_face",
    "save_orbax",
]

_MODULES = {
    "ChatTemplateError": "text.chat",
    "CheckpointError": "errors",
    "GenerationConfig": "generation",
    "Reference": "resolve",
    "ReferenceKind": "resolve",
    "StreamDecoder": "text.stream",
    "Tokenizer": "tokenizer",
    "convert": "conversion",
    "load_tokenizer": "tokenizer",
    "require_tokenizer": "tokenizer",
    "restore_orbax": "orbax",
    "save_hugging_face": "export",
    "save_orbax": "orbax",
}
"""Where each name is defined, if not in `checkpoints.load`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"checkpoints.{_MODULES.get(name, 'load')}"), name)
