"""Finds the model and tokenizer that a configuration names: downloads them, or names a published model to plan."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.presets import PRESETS
from checkpoints.resolve import local, resolve
from checkpoints.tokenizer import Tokenizer, require_tokenizer
from serving.config import EngineConfig


def fetched(config: EngineConfig, *, weights: bool = True) -> EngineConfig:
    """Downloads missing files and returns the configuration with directories in place of names on a hub.

    Without `weights`, or for dummy weights (`load_format`), downloads only the small files.

    Raises:
        CheckpointError: the hub cannot be reached, or has no such model.
    """
    weights = weights and config.load_format != "dummy"
    model = local(config.model, revision=config.revision, download_dir=config.download_dir, weights=weights)
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = local(tokenizer, download_dir=config.download_dir, weights=False)
    drafter = config.speculative_model
    if drafter is not None:
        drafter = local(drafter, download_dir=config.download_dir, weights=weights)
    return config.model_copy(update={"model": model, "tokenizer": tokenizer, "speculative_model": drafter})


def checkpoint_of(config: EngineConfig, dtype: Any = None) -> Checkpoint:
    """The model that the flags name, and how its weights are loaded. `dtype`: in place of the flag."""
    return Checkpoint(
        config.model,
        dtype=config.dtype if dtype is None else dtype,
        load_format=config.load_format,
        seed=config.seed,
        quantization=config.quantization,
        quantization_exclude=config.excluded_from_quantization,
        hf_overrides=config.hf_overrides,
    )


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Loads only the tokenizer, so that a missing one is reported before the weights are loaded.

    Raises:
        CheckpointError: the model has no tokenizer.
    """
    return require_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)


_VENDORS = re.compile(r"^(nvidia|ibm|qwen|tiiuae|kimi|ai21)-(?=nemotron|granite|qwen|falcon|kimi|jamba)")
_ENDINGS = re.compile(r"-(bf16|fp8|fp8-dynamic|nvfp4|hf|base|base-8k|instruct|thinking|reasoning|it|v0\.1)$")


def resolved_model(config: EngineConfig) -> tuple[EngineConfig, str]:
    """The configuration with a model that can be planned, and a notice for the user (empty: none).

    A name on a hub whose files cannot be fetched stands for the published model of the same name.

    Raises:
        CheckpointError: no such model; the message names the nearest ones.
    """
    try:
        ready = fetched(config, weights=False)
    except CheckpointError as error:
        if (name := _published(config.model)) is None or config.revision is not None:
            raise CheckpointError(f"{error}{_nearest(config.model)}") from None
        stored = next((kind for kind in ("fp8", "nvfp4") if config.model.lower().endswith(kind)), None)
        update = {"model": name, "quantization": config.quantization or stored}
        notice = f"{config.model} cannot be fetched; planning the published model {name}"
        return config.model_copy(update=update), notice
    try:
        resolve(ready.model)
    except CheckpointError as error:
        if Path(ready.model).exists():
            raise
        raise CheckpointError(f"{str(error).partition(';')[0]}{_nearest(config.model)}") from None
    return ready, ""


def _published(model: str) -> str | None:
    """The published model that a hub's name means: `nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8`."""
    name = _VENDORS.sub("", model.rpartition("/")[2].lower())
    while name not in PRESETS and _ENDINGS.search(name):
        name = _ENDINGS.sub("", name)
    return name if name in PRESETS else None


def _nearest(model: str) -> str:
    near = difflib.get_close_matches(model.rpartition("/")[2].lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{hint}; `mamba-jax plan --list-models` lists the published models"
