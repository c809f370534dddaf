"""One step of the model over the store: a pure function, to be jitted with store and rows donated.

    store', rows', output = step(model, store, rows, batch)

Every row reads the state S(c) in one slot, absorbs its tokens and writes the states after them to other slots (or the
same one). Rejecting drafts is then a matter of which slot the row reads next.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.paged_attention import copy_pages
from kernels_pallas.slots import read_slots, write_slots
from mamba_jax.batch import DecodeBatch, PageTableBatch, PrefillBatch, SeatBatch, StepOutput
from mamba_jax.drafts import DraftModel, DraftSource, StepFacts
from mamba_jax.layout.decode import DecodeLayout
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.layout.replay import ReplayLayout
from mamba_jax.prompt_logprobs import prompt_logprobs
from mamba_jax.rounding import RoundedRows
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission, SamplingInputs, choose, count_tokens, has_penalties, report_logprobs
from mamba_jax.sampling.masks import MaskBatch, write_masks
from mamba_jax.state_checks import shared_writes, wrong_tags, wrong_tails
from mamba_jax.store import SlotArrays, Store, load, put
from mamba_jax.tails import read_ring


class Model(Protocol):
    """What a step needs of a model; `HybridModel` has it."""

    def hidden(self, tokens: Array, layout: DecodeLayout | PrefillLayout, store: Store) -> tuple[Array, Store]: ...

    def logits(self, hidden: Array) -> Array: ...

    def divided_logits(self, hidden: Array) -> Array: ...


def step(
    model: Model,
    store: Store,
    rows: Rows,
    batch: DecodeBatch | PrefillBatch,
    source: DraftSource | None = None,
    processed_logprobs: bool = False,
) -> tuple[Store, Rows, StepOutput]:
    """Runs one decode or prefill step; see `DecodeBatch` and `PrefillBatch` for what the host says.

    Rows that have absorbed nothing read nothing, whatever their slot holds. Padding rows and tokens write nowhere.
    `source` makes the drafts that `continues` rows verify in their next step; `rows` must have been made for it.
    Log-probabilities of output tokens are the model's own or, if `processed_logprobs`, of what they are drawn from.
    """
    if isinstance(batch, DecodeBatch):
        return _decode(model, store, rows, batch, source, processed_logprobs)
    return _prefill(model, store, rows, batch, source, processed_logprobs)


def seat(rows: Rows, batch: SeatBatch, source: DraftSource | None = None) -> Rows:
    """A request takes a seat: forgets the last tenant and notes the new one's sampling parameters."""

    def put(table: Array, value: Array | int) -> Array:
        return table.at[batch.row_id].set(value)

    counted = {}
    if batch.output_counts is not None and batch.prompt_seen is not None:
        counted = {
            "output_counts": put(rows.output_counts, batch.output_counts),
            "prompt_seen": put(rows.prompt_seen, batch.prompt_seen),
        }
    return dataclasses.replace(
        rows,
        length=put(rows.length, 0),
        last_token=put(rows.last_token, 0),
        slot=put(rows.slot, 0),
        anchor=None if rows.anchor is None else put(rows.anchor, 0),
        drafts=put(rows.drafts, -1),
        sampling=jax.tree.map(put, rows.sampling, batch.sampling),
        source=rows.source if source is None else source.seat(rows.source, batch.row_id, batch.tokens),
        page_table=None if rows.page_table is None else put(rows.page_table, 0),
        masks=rows.masks and dataclasses.replace(rows.masks, on=put(rows.masks.on, False)),
        **counted,
    )


def set_page_table(rows: Rows, batch: PageTableBatch) -> Rows:
    """A seat's page table, which stays until steps change it, or the seat has a new tenant."""
    assert rows.page_table is not None
    return dataclasses.replace(rows, page_table=rows.page_table.at[batch.row_id].set(batch.pages))


def mask(rows: Rows, batch: MaskBatch) -> Rows:
    """What some seats may choose in their next step; stays until it is written again, or the seat has a new tenant."""
    assert rows.masks is not None
    return dataclasses.replace(rows, masks=write_masks(rows.masks, batch))


def _decode(
    model: Model,
    store: Store,
    rows: Rows,
    batch: DecodeBatch,
    source: DraftSource | None,
    processed_logprobs: bool,
) -> tuple[Store, Rows, StepOutput]:
    width = batch.tokens.shape[1]
    rows, page_table = _page_tables(rows, batch)
    # The seat's own truth wins where the host has not seen the last step's result yet.
    own = jnp.concatenate([rows.last_token[:, None], rows.drafts], axis=1)[batch.row_id, :width]
    tokens = jnp.where(batch.continues[:, None], own, batch.tokens)
    length = jnp.where(batch.continues, rows.length[batch.row_id], batch.length)
    read_slot = jnp.where(batch.continues, rows.slot[batch.row_id], batch.read_slot)
    certain = batch.num_tokens - batch.num_drafts
    num_drafts, num_tokens = batch.num_drafts, batch.num_tokens
    if width > 1:
        # The host plans for as many drafts as there can be; the seat may have fewer.
        made = jnp.cumprod(own[:, 1:] >= 0, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
        num_drafts = jnp.where(batch.continues, jnp.minimum(num_drafts, made), num_drafts)
        if store.rounded is not None:
            # A step ends where the state is rounded: what follows goes on from what was rounded.
            left = store.rounded.every - length % store.rounded.every
            num_drafts = jnp.clip(left - certain, 0, num_drafts)
        num_tokens = certain + num_drafts
    layout: DecodeLayout
    if store.tails is None:
        layout = DecodeLayout.of(
            length=length,
            num_tokens=num_tokens,
            read_slot=read_slot,
            write_slot=batch.write_slot,
            page_table=page_table,
        )
        writer = jnp.repeat(jnp.arange(batch.row_id.shape[0]), width)
        wrong = wrong_tags(store, batch.row_id, length, read_slot)
        wrong |= shared_writes(store, layout.read_slot, layout.write_slot.reshape(-1), writer)
    else:
        assert rows.anchor is not None
        assert batch.anchor is not None
        layout = ReplayLayout.from_anchor(
            length=length,
            num_tokens=num_tokens,
            read_slot=read_slot,
            anchor=jnp.where(batch.continues, rows.anchor[batch.row_id], batch.anchor),
            tail_id=batch.row_id,
            write_slot=batch.write_slot,
            page_table=page_table,
            steps=width,
            interval=store.tails.interval,
        )
        wrong = wrong_tags(store, batch.row_id, layout.anchor, read_slot) | wrong_tails(store, layout)
        wrong |= shared_writes(store, layout.read_slot, layout.due_slot, jnp.arange(batch.row_id.shape[0]))
    # A source wants the hidden state before every row's first token.
    resumed = read_slots(store.hidden, jnp.where(num_tokens == 0, read_slot, 0) if source is None else read_slot)
    if isinstance(layout, ReplayLayout) and source is not None:
        assert store.tails is not None
        last = read_ring(store.tails.hidden, layout.tail_id, length[:, None] - 1)[:, 0]
        resumed = jnp.where((length > layout.anchor)[:, None], last, resumed)
    store = _copy_pages(store, batch.page_copy)
    hidden, store = model.hidden(jnp.maximum(tokens, 0).reshape(-1), layout, store)
    # A row without tokens finds its slot's hidden state where its first token's would be. (All padding gets it, so that
    # what is written depends on what was read. Without an order between the two the compiler would copy the store.)
    hidden = jnp.where(layout.valid[:, None], hidden, jnp.repeat(resumed, width, axis=0).astype(hidden.dtype))
    if isinstance(layout, ReplayLayout):
        store = _write_replayed(store, hidden, layout, wrong, last_hidden=source is not None)
    else:
        held = jnp.where(jnp.repeat(wrong, width), -1, layout.positions + 1)
        store = _write_hidden(store, hidden, layout.write_slot.reshape(-1), held)

    # Head j follows the last certain token and j drafts.
    heads = jnp.arange(width)
    at = jnp.clip(certain[:, None] - 1 + heads, 0, width - 1)
    by_row = hidden.reshape(-1, width, hidden.shape[-1])
    head_hidden = by_row if width == 1 else jnp.take_along_axis(by_row, at[..., None], axis=1)
    drafts = jnp.take_along_axis(tokens, jnp.clip(certain[:, None] + heads[:-1], 0, width - 1), axis=1)
    emission, reported, finite = _emit(
        model,
        rows,
        head_hidden,
        batch.row_id,
        batch.sample,
        drafts,
        num_drafts,
        length + certain,
        processed_logprobs,
    )

    kept = jnp.where(num_tokens > 0, certain + emission.accepted, 0)
    if isinstance(layout, ReplayLayout):
        # The anchor moves on where what is kept has reached a multiple of the interval.
        moved = (kept > 0) & (layout.next_multiple <= length + kept)
        slot = jnp.where(moved, layout.write_slot[:, 0], read_slot)
        anchor = jnp.where(moved, layout.next_multiple, layout.anchor)
        rows = _commit(rows, batch.row_id, length + kept, slot, emission, anchor)
    else:
        landed = jnp.take_along_axis(layout.write_slot, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
        rows = _commit(rows, batch.row_id, length + kept, jnp.where(kept > 0, landed, read_slot), emission)
    if source is not None:
        store, rows = _propose(
            source,
            model,
            store,
            rows,
            emission,
            layout=layout,
            tokens=tokens.reshape(-1),
            hidden=hidden,
            before=resumed,
            row_id=batch.row_id,
            length=length,
            kept=kept,
            emitted_from=length + certain,
            page_table=page_table,
            # A step that verifies no drafts has few to follow: making them must not cost more than it does.
            count=min(rows.drafts.shape[1], max(width - 1, 1)),
        )
    output = StepOutput(
        tokens=emission.tokens,
        num_emitted=emission.count,
        kept=kept,
        logprobs=reported[0],
        top_ids=reported[1],
        top_logprobs=reported[2],
        tag_error=wrong.any(),
        finite=finite,
        prompt_logprobs=None,
        num_drafts=num_drafts if width > 1 else None,
        proposed=_proposed(rows, batch.row_id),
    )
    return store, rows, output


def _prefill(
    model: Model,
    store: Store,
    rows: Rows,
    batch: PrefillBatch,
    source: DraftSource | None,
    processed_logprobs: bool,
) -> tuple[Store, Rows, StepOutput]:
    rows, page_table = _page_tables(rows, batch)
    layout = PrefillLayout.of(
        num_packed=batch.tokens.shape[0],
        tile_size=batch.tile_size,
        length=batch.length,
        num_tokens=batch.num_tokens,
        read_slot=batch.read_slot,
        tile_write_slot=batch.tile_write_slot,
        page_table=page_table,
    )
    wrong = wrong_tags(store, batch.row_id, batch.length, batch.read_slot)
    wrong |= shared_writes(store, layout.read_slot, layout.tile_write_slot, layout.tile_row)
    before = read_slots(store.hidden, layout.read_slot)
    store = _copy_pages(store, batch.page_copy)
    hidden, store = model.hidden(batch.tokens, layout, store)
    # As in `_decode`, what is written must depend on what was read.
    hidden = jnp.where(layout.valid[:, None], hidden, before[layout.token_row].astype(hidden.dtype))
    tile_last = jnp.maximum(layout.row_start[layout.tile_row] + layout.tile_end - 1, 0)
    held = jnp.where(wrong[layout.tile_row], -1, batch.length[layout.tile_row] + layout.tile_end)
    store = _write_hidden(store, hidden[tile_last], layout.tile_write_slot, held)
    row_last = jnp.maximum(layout.row_start + batch.num_tokens - 1, 0)
    none = jnp.zeros((batch.row_id.shape[0], 0), jnp.int32)
    after = batch.length + batch.num_tokens
    emission, reported, finite = _emit(
        model,
        rows,
        hidden[row_last][:, None],
        batch.row_id,
        batch.sample,
        none,
        jnp.zeros_like(after),
        after,
        processed_logprobs,
    )
    # The slot of a row's last tile; rows without tokens have no tile and keep what they read.
    end_tile = (layout.tile_end == batch.num_tokens[layout.tile_row]) & (layout.tile_end > 0)
    end_row = jnp.where(end_tile, layout.tile_row, batch.row_id.shape[0])
    landed = jnp.asarray(batch.read_slot).at[end_row].set(layout.tile_write_slot, mode="drop")
    rows_after = _commit(rows, batch.row_id, after, landed, emission, None if rows.anchor is None else after)
    if source is not None:
        store, rows_after = _propose(
            source,
            model,
            store,
            rows_after,
            emission,
            layout=layout,
            tokens=batch.tokens,
            hidden=hidden,
            before=before,
            row_id=batch.row_id,
            length=batch.length,
            kept=batch.num_tokens,
            emitted_from=after,
            page_table=page_table,
            count=rows.drafts.shape[1],
        )
    output = StepOutput(
        tokens=emission.tokens,
        num_emitted=emission.count,
        kept=batch.num_tokens,
        logprobs=reported[0],
        top_ids=reported[1],
        top_logprobs=reported[2],
        tag_error=wrong.any(),
        finite=finite,
        prompt_logprobs=prompt_logprobs(model.logits, rows, batch, layout, hidden, before),
        proposed=_proposed(rows_after, batch.row_id),
    )
    return store, rows_after, output


def _emit(
    model: Model,
    rows: Rows,
    head_hidden: Float[Array, "rows H hidden"],
    row_id: Int[Array, " rows"],
    sample: Bool[Array, " rows"],
    drafts: Int[Array, "rows H-1"],
    num_drafts: Int[Array, " rows"],
    length: Int[Array, " rows"],
    processed_logprobs: bool,
) -> tuple[Emission, tuple[Array, Array, Array], Bool[Array, " rows"]]:
    """Logits at the heads, what comes out of them, and whether those that count are all finite.

    Logits stay where they were computed: devices collect them only for rows that ask for more than the largest.
    """
    count, width, _ = head_hidden.shape
    flat = model.divided_logits(head_hidden.reshape(count * width, -1))
    logits = flat.reshape(count, width, -1)
    asked: dict[str, Any] = {
        "drafts": drafts,
        "num_drafts": num_drafts,
        "length": length,
        "sample": sample & (row_id > 0),
        "row_id": row_id,
        "table": rows.sampling,
        "output_counts": rows.output_counts,
        "prompt_seen": rows.prompt_seen,
        "masks": rows.masks,
    }
    emission = choose(logits, **asked)
    wanted = jnp.where((emission.tokens >= 0) & (row_id > 0)[:, None], rows.sampling.logprobs[row_id][:, None], -1)
    unused = jnp.arange(width) > emission.accepted[:, None]
    finite = (emission.finite | unused).all(axis=-1)

    def processed(flat: Array) -> Array:
        return SamplingInputs.of(**asked).processed(flat.reshape(logits.shape)).reshape(flat.shape)

    given = processed if processed_logprobs else lambda flat: flat
    reported = report_logprobs(flat, emission.tokens.reshape(-1), wanted.reshape(-1), given)
    return emission, jax.tree.map(lambda each: each.reshape(count, width, *each.shape[1:]), reported), finite


def _commit(
    rows: Rows,
    row_id: Int[Array, " rows"],
    length: Int[Array, " rows"],
    slot: Int[Array, " rows"],
    emission: Emission,
    anchor: Int[Array, " rows"] | None = None,
) -> Rows:
    """The seats' new truth. Padding rows change nothing, not even seat 0."""
    outside = rows.length.shape[0]
    seat_of = jnp.where(row_id > 0, row_id, outside)
    newest = _newest(emission)
    emitting = jnp.where(emission.count > 0, seat_of, outside)
    counted = jnp.where(has_penalties(rows.sampling)[row_id], emitting, outside)[:, None]
    counted = jnp.where(emission.tokens >= 0, counted, outside)
    return dataclasses.replace(
        rows,
        length=rows.length.at[seat_of].set(length, mode="drop"),
        slot=rows.slot.at[seat_of].set(slot, mode="drop"),
        anchor=None if rows.anchor is None or anchor is None else rows.anchor.at[seat_of].set(anchor, mode="drop"),
        last_token=rows.last_token.at[emitting].set(newest, mode="drop"),
        output_counts=count_tokens(rows.output_counts, counted, emission.tokens),
    )


def _propose(
    source: DraftSource,
    model: Model,
    store: Store,
    rows: Rows,
    emission: Emission,
    *,
    layout: DecodeLayout | PrefillLayout,
    tokens: Int[Array, " T"],
    hidden: Float[Array, "T hidden"],
    before: Float[Array, "rows hidden"],
    row_id: Int[Array, " rows"],
    length: Int[Array, " rows"],
    kept: Int[Array, " rows"],
    emitted_from: Int[Array, " rows"],
    page_table: Int[Array, "rows pages"],
    count: int,
) -> tuple[Store, Rows]:
    """Drafts, `count` at most, for the next step of the rows that have emitted something."""
    facts = StepFacts(
        layout=layout,
        tokens=tokens,
        hidden=hidden,
        before=before,
        row_id=row_id,
        length=length,
        kept=kept,
        emitted=emission.tokens,
        emitted_from=emitted_from,
        sampled=emission.count > 0,
        newest=_newest(emission),
        page_table=page_table,
    )
    drafts, store, state = source.propose(cast(DraftModel, model), store, rows.source, facts, count)
    drafts = jnp.pad(drafts, ((0, 0), (0, rows.drafts.shape[1] - drafts.shape[1])), constant_values=-1)
    seat_of = jnp.where(facts.sampled, row_id, rows.length.shape[0])
    return store, dataclasses.replace(rows, drafts=rows.drafts.at[seat_of].set(drafts, mode="drop"), source=state)


def _proposed(rows: Rows, row_id: Int[Array, " rows"]) -> Int[Array, "rows drafts"] | None:
    """What the seats hold now of drafts; nothing where no mask depends on them."""
    return rows.drafts[row_id] if rows.masks is not None and rows.drafts.shape[1] else None


def _newest(emission: Emission) -> Int[Array, " rows"]:
    return jnp.take_along_axis(emission.tokens, jnp.maximum(emission.count - 1, 0)[:, None], axis=1)[:, 0]


def _page_tables(rows: Rows, batch: DecodeBatch | PrefillBatch) -> tuple[Rows, Int[Array, "rows pages"]]:
    """The page tables of the batch's rows: its own, or those of their seats once the step's changes are made."""
    if batch.page_table is not None:
        return rows, batch.page_table
    assert rows.page_table is not None
    assert batch.page_updates is not None
    seat, index, page = batch.page_updates.T
    tables = rows.page_table.at[seat, index].set(page)
    return dataclasses.replace(rows, page_table=tables), tables[batch.row_id]


def _copy_pages(store: Store, page_copy: Int[Array, "rows 2"]) -> Store:
    """Copy-on-write of partly filled pages, before anything is written to them."""
    source, target = page_copy[:, 0], page_copy[:, 1]
    return dataclasses.replace(store, kv=tuple(copy_pages(kv, source=source, target=target) for kv in store.kv))


def _write_hidden(
    store: Store,
    hidden: Float[Array, "n hidden"],
    write_slot: Int[Array, " n"],
    length: Int[Array, " n"],
) -> Store:
    """Write final hidden states, and debugging tags, into the slots that have absorbed `length` tokens.

    This completes the slots. Where running rows are rounded, it also rounds the states that are due.
    """
    tags = store.tags
    if tags is not None:
        times = read_slots(tags, write_slot)[:, 0] + 1
        tags = write_slots(tags, jnp.stack([times, length], axis=1), write_slot)
    store = dataclasses.replace(store, hidden=write_slots(store.hidden, hidden, write_slot), tags=tags)
    return store if store.rounded is None else _round(store, store.rounded, write_slot, length)


def _round(store: Store, rounded: RoundedRows, write_slot: Int[Array, " n"], length: Int[Array, " n"]) -> Store:
    """The states of these slots that are those after a multiple of `rounded.every` tokens, rounded where they lie."""
    due = jnp.where((length > 0) & (length % rounded.every == 0), write_slot, 0)
    found = due[jnp.nonzero(due, size=len(due), fill_value=0)[0]]

    def one(i: Int[Array, ""], slots: tuple[SlotArrays, ...]) -> tuple[SlotArrays, ...]:
        def changed(name: str, array: Array) -> Array:
            if name not in rounded.names:
                return array
            return put(array, rounded.narrow.rounded(load(array, found[i])), found[i])

        return tuple({name: changed(name, array) for name, array in arrays.items()} for arrays in slots)

    return dataclasses.replace(store, slots=jax.lax.fori_loop(0, (due > 0).sum(), one, store.slots))


def _write_replayed(
    store: Store,
    hidden: Float[Array, "T hidden"],
    layout: ReplayLayout,
    wrong: Bool[Array, " rows"],
    *,
    last_hidden: bool,
) -> Store:
    """Write the hidden state of each state that is due, and (`last_hidden`) those of the step's tokens into the tails.

    Both are written with their debugging tags.
    """
    tails = store.tails
    assert tails is not None
    by_row = hidden.reshape(*layout.shape, -1)
    nth = jnp.minimum(layout.next_multiple - layout.length - 1, by_row.shape[1] - 1)
    due = jnp.take_along_axis(by_row, nth[:, None, None], axis=1)[:, 0]
    store = _write_hidden(store, due, layout.due_slot, jnp.where(wrong, -1, layout.next_multiple))
    if last_hidden:
        tails = dataclasses.replace(tails, hidden=layout.append(tails.hidden, by_row.astype(tails.hidden.dtype)))
    if tails.tags is not None:
        held = jnp.where(jnp.repeat(wrong, by_row.shape[1]), -1, layout.positions).reshape(layout.shape)
        tails = dataclasses.replace(tails, tags=layout.append(tails.tags, held))
    return dataclasses.replace(store, tails=tails)
