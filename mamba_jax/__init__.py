"""Hybrid Mamba2/attention language models in JAX: config, model, state store and the step over it.

    model = mamba_jax.load("path/to/checkpoint")
    logits = model(tokens, lengths)

`model` works under `jax.jit`, `jax.grad` and sharding. For serving, `init_store`, `init_rows` and `step` run the same
model over slots and pages.
"""

from typing import Any

from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch, SeatBatch, StepOutput
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.layout import Layout, SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.rows import Rows, init_rows
from mamba_jax.step import seat, step
from mamba_jax.store import Store, init_store
from mamba_jax.train.score import score
from mamba_jax.version import version

__all__ = [
    "DecodeBatch", "HybridConfig", "HybridModel", "Layout", "MixedBatch", "ModelConfigError", "PrefillBatch", "Rows",
    "SeatBatch", "SequenceLayout", "StepOutput", "StepPrograms", "Store", "init_rows", "init_store", "load",
    "parameters", "save", "score", "seat", "step",
]  # fmt: skip


__version__ = version()


def load(ref: str, *, dtype: Any = None, **options: Any) -> HybridModel:
    """Loads a model: a Hugging Face directory, an Orbax directory, or "demo". See `checkpoints.load_model`.

    `dtype` None is "auto": float32 on CPU, the checkpoint's elsewhere.

    Raises:
        checkpoints.CheckpointError: anything wrong with what `ref` names.
    """
    # Above us in the house, and only needed by those who load: hence not imported with the module.
    from checkpoints import load_model

    model: HybridModel = load_model(ref, dtype="auto" if dtype is None else dtype, **options)
    model.source = str(ref)
    return model


def save(model: HybridModel, directory: str, *, like: str | None = None) -> None:
    """Writes a model as a Hugging Face directory that transformers reads. See `checkpoints.save_hugging_face`.

    Args:
        model: with wide weights; each keeps its dtype.
        directory: does not exist, or is empty.
        like: a model whose config.json and tokenizer are copied; None: the one that `load` has read.
    Raises:
        checkpoints.CheckpointError: the directory has content, or `like` has no config.json or another model's.
    """
    from checkpoints import CheckpointError, save_hugging_face
    from checkpoints.resolve import resolve

    like = model.source if like is None else like
    if like is None:
        raise CheckpointError("the model was not loaded by mamba_jax.load: give like=, a directory with config.json")
    save_hugging_face(directory, model, resolve(like).files)
