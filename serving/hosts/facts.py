"""What must be the same on all hosts before they can run the same programs."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from checkpoints import load_config
from serving.config import EngineConfig

_OWN = {"model", "tokenizer", "download_dir", "chat_template", "compilation_cache"}
"""Flags that may differ: where a host keeps files. The model is compared by its structure, and by its weights once they
are loaded (`Leader.wait_until_ready`)."""
_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def facts_of(config: EngineConfig) -> dict[str, str]:
    """By name.

    Raises:
        CheckpointError: the model's configuration cannot be read.
    """
    flags = {f"--{name.replace('_', '-')}": str(value) for name, value in config if name not in _OWN}
    described = load_config(config.model, hf_overrides=config.hf_overrides)
    structure = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    return flags | {f"the version of {name}": version(name) for name in _PACKAGES} | {"the model": structure}
