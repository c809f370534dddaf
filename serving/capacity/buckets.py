"""The step programs of the engine that a plan includes, and their names."""

from __future__ import annotations

from mamba_jax.batch import DecodeBatch, MixedBatch
from mamba_jax.programs import StepBatch
from serving.engine.steps.batching import BatchBuilder, PrefillShape

DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"
"""Kinds of programs, with which their names begin."""


def kind_of(batch: StepBatch) -> str:
    """Returns the kind of a batch's program."""
    return DECODE if isinstance(batch, DecodeBatch) else MIXED if isinstance(batch, MixedBatch) else PREFILL


def decode_name(rows: int) -> str:
    """Returns the name of a decode program."""
    return f"{DECODE}, {rows} rows"


def prefill_name(shape: PrefillShape) -> str:
    """Returns the name of a prefill program."""
    return f"{PREFILL}, {shape.tokens:,} tokens of {shape.rows} rows"


def mixed_name(rows: int, shape: PrefillShape) -> str:
    """Returns the name of a program for decode and prefill rows."""
    return f"{MIXED}, {rows} rows and {shape.tokens:,} tokens"


def decode_shapes(batches: BatchBuilder, full: bool) -> list[int]:
    """Rows of all decode programs, or of the largest."""
    return list(batches.decode_shapes) if full else batches.decode_shapes[-1:]


def prefill_shapes(batches: BatchBuilder, full: bool) -> list[PrefillShape]:
    """All of them, or the one for long prompts: most tokens, few rows."""
    if full:
        return list(batches.prefill_shapes)
    most = batches.prefill_shapes[-1].tokens
    return [next(shape for shape in batches.prefill_shapes if shape.tokens == most)]
