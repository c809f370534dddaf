"""Weights, configurations, tokenizers and sampling defaults: from Hugging Face and Orbax directories, and to Orbax.

Names are imported when they are first used: `import checkpoints` imports neither JAX nor Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.config_json import GenerationConfig as GenerationConfig
    from checkpoints.conversion import convert as convert
    from checkpoints.errors import CheckpointError as CheckpointError
    from checkpoints.export import save_hugging_face as save_hugging_face
    from checkpoints.load import generation_config as generation_config
    from checkpoints.load import load_config as load_config
    from checkpoints.load import load_model as load_model
    from checkpoints.orbax import restore_orbax as restore_orbax
    from checkpoints.orbax import save_orbax as save_orbax
    from checkpoints.resolve import Reference as Reference
    from checkpoints.resolve import ReferenceKind as ReferenceKind
    from checkpoints.text.chat import ChatTemplateError as ChatTemplateError
    from checkpoints.text.stream import StreamDecoder as StreamDecoder
    from checkpoints.tokenizer import Tokenizer as Tokenizer
    from checkpoints.tokenizer import load_tokenizer as load_tokenizer
    from checkpoints.tokenizer import require_tokenizer as require_tokenizer

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
