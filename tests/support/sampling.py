"""Sampling parameters of several rows."""

import jax

from mamba_jax.sampling import SamplingTable, init_sampling_table, sampling_row


def table_of(*rows: dict) -> SamplingTable:
    """A table with seats 1..len(rows); seat 0 is padding's."""
    table = init_sampling_table(len(rows) + 1)
    for i, row in enumerate(rows, 1):
        table = jax.tree.map(lambda column, value, i=i: column.at[i].set(value), table, sampling_row(**row))
    return table
