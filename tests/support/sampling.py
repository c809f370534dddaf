"""Sampling parameters of several rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.sampling import SamplingInputs, SamplingTable, sampling_row


def table_of(*rows: dict) -> SamplingTable:
    """A table with seats 1..len(rows); seat 0 is padding's."""
    return jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *(sampling_row(**row) for row in ({}, *rows)))


def asked_of(table: SamplingTable, shape: tuple[int, ...], **given: Any) -> SamplingInputs:
    """Of the rows in seats 1.. with logits of a shape [rows, heads, vocab]: all sample, and all heads have drafts."""
    (rows, heads, vocab), seats = shape, len(table.temperature)
    others = {
        "drafts": np.zeros((rows, heads - 1), np.int32),
        "num_drafts": np.full(rows, heads - 1, np.int32),
        "length": np.zeros(rows, np.int32),
        "sample": np.ones(rows, bool),
        "row_id": np.arange(1, rows + 1, dtype=np.int32),
        "output_counts": jnp.zeros((seats, vocab), jnp.int32),
        "prompt_seen": jnp.zeros((seats, vocab), bool),
    }
    return SamplingInputs.of(table=table, **others | given)
