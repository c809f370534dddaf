"""Seats: the device's own record of each running request, from which its next step continues."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mamba_jax.batch import DecodeBatch, PageTableBatch, PrefillBatch, SeatBatch
from mamba_jax.drafts import DraftSource
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission, count_tokens, has_penalties
from mamba_jax.sampling.masks import MaskBatch, write_masks


def seat(rows: Rows, batch: SeatBatch, source: DraftSource | None = None) -> Rows:
    """Gives a seat to a request: clears the last request's values and sets the new one's sampling parameters."""

    def put(table: Array, value: Array | int) -> Array:
        return table.at[batch.row_id].set(value)

    counted = {}
    if batch.output_counts is not None and batch.prompt_seen is not None:
        counted = {
            "output_counts": put(rows.output_counts, batch.output_counts),
            "prompt_seen": put(rows.prompt_seen, batch.prompt_seen),
        }
    return dataclasses.replace(
        rows, length=put(rows.length, 0), last_token=put(rows.last_token, 0), slot=put(rows.slot, 0),
        anchor=None if rows.anchor is None else put(rows.anchor, 0), drafts=put(rows.drafts, -1),
        sampling=jax.tree.map(put, rows.sampling, batch.sampling),
        source=rows.source if source is None else source.seat(rows.source, batch.row_id, batch.tokens),
        page_table=None if rows.page_table is None else put(rows.page_table, 0),
        adapter=None if rows.adapter is None or batch.adapter is None else put(rows.adapter, batch.adapter),
        masks=rows.masks and dataclasses.replace(rows.masks, on=put(rows.masks.on, False)), **counted,
    )  # fmt: skip


def set_page_table(rows: Rows, batch: PageTableBatch) -> Rows:
    """Sets a seat's page table. It stays until steps change it or the seat is given to another request."""
    assert rows.page_table is not None
    return dataclasses.replace(rows, page_table=rows.page_table.at[batch.row_id].set(batch.pages))


def mask(rows: Rows, batch: MaskBatch) -> Rows:
    """Sets the tokens that some seats may choose in their next step. A mask stays until it is set again."""
    assert rows.masks is not None
    return dataclasses.replace(rows, masks=write_masks(rows.masks, batch))


def update_page_tables(rows: Rows, batch: DecodeBatch | PrefillBatch) -> tuple[Rows, Int[Array, "rows pages"]]:
    """Returns the page tables of the batch's rows: the batch's own, or their seats' after the step's updates."""
    if batch.page_table is not None:
        return rows, batch.page_table
    assert rows.page_table is not None
    assert batch.page_updates is not None
    seat, index, page = batch.page_updates.T
    tables = rows.page_table.at[seat, index].set(page)
    return dataclasses.replace(rows, page_table=tables), tables[batch.row_id]


def commit(
    rows: Rows,
    row_id: Int[Array, " rows"],
    length: Int[Array, " rows"],
    slot: Int[Array, " rows"],
    emission: Emission,
    anchor: Int[Array, " rows"] | None = None,
) -> Rows:
    """Returns the seats after a step. Padding rows change nothing, not even seat 0."""
    outside = rows.length.shape[0]
    seat_of = jnp.where(row_id > 0, row_id, outside)
    emitting = jnp.where(emission.count > 0, seat_of, outside)
    counted = jnp.where(has_penalties(rows.sampling)[row_id], emitting, outside)[:, None]
    counted = jnp.where(emission.tokens >= 0, counted, outside)
    return dataclasses.replace(
        rows,
        length=rows.length.at[seat_of].set(length, mode="drop"),
        slot=rows.slot.at[seat_of].set(slot, mode="drop"),
        anchor=None if rows.anchor is None or anchor is None else rows.anchor.at[seat_of].set(anchor, mode="drop"),
        last_token=rows.last_token.at[emitting].set(newest(emission), mode="drop"),
        output_counts=count_tokens(rows.output_counts, counted, emission.tokens),
    )


def newest(emission: Emission) -> Int[Array, " rows"]:
    """Returns the last token that each row emitted; any token for rows that emitted none."""
    return jnp.take_along_axis(emission.tokens, jnp.maximum(emission.count - 1, 0)[:, None], axis=1)[:, 0]
