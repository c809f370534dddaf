"""Weights, configurations, tokenizers and sampling defaults: from Hugging Face and Orbax directories, and to Orbax."""

from checkpoints.chat import ChatTemplateError
from checkpoints.conversion import convert
from checkpoints.errors import CheckpointError
from checkpoints.generation import GenerationConfig
from checkpoints.load import generation_config, load_config, load_model, load_tokenizer, require_tokenizer
from checkpoints.orbax import restore_orbax, save_orbax
from checkpoints.resolve import Reference, ReferenceKind, resolve
from checkpoints.stream import StreamDecoder
from checkpoints.tokenizer import Tokenizer

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
    "resolve",
    "restore_orbax",
    "save_orbax",
]
