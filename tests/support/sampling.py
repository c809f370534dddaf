"""Sampling parameters of several rows."""

from typing import Any

import jax
import jax.numpy as jnp

from mamba_jax.sampling import SamplingInputs, SamplingTable, init_sampling_table, sampling_row


def table_of(*rows: dict) -> SamplingTable:
    """A table with seats 1..len(rows); seat 0 is padding's."""
    table = init_sampling_table(len(rows) + 1)
    for i, row in enumerate(rows, 1):
        table = jax.tree.map(lambda column, value, i=i: column.at[i].set(value), table, sampling_row(**row))
    return table


def asked_of(table: SamplingTable, shape: tuple[int, ...], **given: Any) -> SamplingInputs:
    """Of the rows in seats 1.. with logits of a shape [rows, heads, vocab]: all sample, and all heads have drafts."""
    (rows, heads, vocab), seats = shape, len(table.temperature)
    others = {
        "drafts": jnp.zeros((rows, heads - 1), jnp.int32),
        "num_drafts": jnp.full(rows, heads - 1),
        "length": jnp.zeros(rows, jnp.int32),
        "sample": jnp.ones(rows, bool),
        "row_id": jnp.arange(1, rows + 1),
        "output_counts": jnp.zeros((seats, vocab), jnp.int32),
        "prompt_seen": jnp.zeros((seats, vocab), bool),
    }
    return SamplingInputs.of(table=table, **others | given)
