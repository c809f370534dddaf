"""Planted faults on the device's side: in layouts, in the step, and in the arrays that the host fills for them.

`DEVICE[n]` is what the table in docs/mutations.md calls Dn. A fault is a function that takes pytest's monkeypatch.
`compiles` names the programs that it changes; the others are shared with the sound ones.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import fixed_order
from kernels_pallas.gated_recurrence import xla as between
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.paged_attention import xla as attention_xla
from kernels_pallas.recurrence import api as recurrence_api
from kernels_pallas.recurrence import native
from kernels_pallas.recurrence.scan import xla as scan_xla
from mamba_jax.layout import DecodeLayout, PrefillLayout
from mamba_jax.modules import conv as conv_module
from serving.core.cache.cache import Cache
from serving.core.cache.row_state import RowState
from serving.engine.requests.adapters import AdapterTable
from serving.engine.requests.initial_states import InitialStates
from serving.engine.steps.batching import BatchBuilder
from serving.engine.steps.page_tables import PageTables
from serving.engine.steps.results import HostOutput
from tests.serving.core.mutations.registry import Fault, Patch, mutation, replacing
from tests.serving.core.mutations.steps import no_sitting_out

STEP = [
    importlib.import_module(f"mamba_jax.{part}")
    for part in ("programs", "step.run", "step.decode", "step.prefill", "step.seats")
]


def in_step(name: str) -> tuple[Any, ...]:
    """Where the function `name` of the step is, for `replacing`: each module that imports it."""
    first, *others = (module for module in STEP if callable(getattr(module, name, None)))
    return first, name, *others


CONVOLUTION = conv_module, "causal_conv1d_update", between
"""Where the convolution of decode steps is."""


DEVICE: dict[int, Fault] = {}
DRAFTS: dict[int, Fault] = {}
"""Those that need drafts to be seen: see `draft_faults`."""
REPLAY: dict[int, Fault] = {}
"""Those of rows held by anchors, which draft too: see `draft_faults`."""
STRUCTURED: dict[int, Fault] = {}
"""Those of rows under a grammar that draft."""
ADAPTERS: dict[int, Fault] = {}
"""Those of rows with adapters."""
BITS: dict[int, Fault] = {}
"""Those that change only bits."""


def planted() -> dict[int, Fault]:
    """All of them."""
    return DEVICE | DRAFTS | REPLAY | STRUCTURED | ADAPTERS | BITS


def fault(number: int, *where: Any, compiles: str | None = None, table: dict[int, Fault] = DEVICE):
    """Register a fault of the device's side, as `mutation` does those of the host."""
    assert number not in planted()
    return mutation(number, *where, table=table, kind="D", compiles=compiles)


def filling(*methods: str) -> Callable[[Callable], Callable[[Patch], None]]:
    """Makes a plant of `change(builder, batch, rows)`, which runs after each batch that the methods have filled."""

    def decorate(change: Callable) -> Callable[[Patch], None]:
        def fill(sound, self, rows):
            batch = sound(self, rows)
            change(self, batch, rows)
            return batch

        @functools.wraps(change)
        def plant(patch: Patch) -> None:
            for method in methods:
                replacing(BatchBuilder, method)(fill)(patch)

        return plant

    return decorate


# -- the prefill program --


@fault(1, conv_module, "causal_conv1d_prefill", between, compiles="prefill")
def window_of_the_chunk_alone(sound, x, weight, bias, store, packed, **how):
    y, _ = sound(x, weight, bias, store, packed, **how)
    alone = dataclasses.replace(packed, read_slot=jnp.zeros_like(packed.read_slot))
    return y, sound(x, weight, bias, store, alone, **how)[1]


@fault(2, PrefillLayout, "of", compiles="prefill")
def one_grid_for_the_batch(sound, *, tile_size, tile_write_slot, **rest):
    layout = sound(tile_size=tile_size, tile_write_slot=tile_write_slot, **rest)
    tile, packed = jnp.arange(tile_write_slot.shape[0]), layout.packed
    first = jnp.where(packed.tiles.first & (packed.tile_end > 0), tile, 0)
    in_row = tile - jnp.zeros_like(packed.row_start).at[packed.tile_row].max(first)[packed.tile_row]
    at = packed.row_start[packed.tile_row] // tile_size + in_row
    slots = jnp.where(packed.tile_end > 0, jnp.asarray(tile_write_slot)[at], 0)
    tiles = dataclasses.replace(packed.tiles, write_slot=slots)
    return dataclasses.replace(layout, packed=dataclasses.replace(packed, tiles=tiles))


@fault(3, between, "recurrence_scan", compiles="prefill")
def fresh_rows_inherit_a_state(sound, entry, store, tiles, **how):
    fresh = tiles.first & (tiles.read_slot == 0)
    read_slot = jnp.where(fresh, tiles.write_slot, tiles.read_slot)
    return sound(entry, store, dataclasses.replace(tiles, read_slot=read_slot), **how)


@fault(4, PrefillLayout, "of", compiles="prefill")
def padding_is_absorbed(sound, **rest):
    layout = sound(**rest)
    packed = dataclasses.replace(layout.packed, tile_valid=jnp.ones_like(layout.packed.tile_valid))
    return dataclasses.replace(layout, packed=packed)


fault(5, *in_step("write_hidden"), compiles="prefill")(lambda sound, store, *_: store)


@fault(6, between, "recurrence_scan", compiles="prefill")
def states_one_tile_early(sound, entry, store, tiles, **how):
    # Each write but a row's last moves to the tile before it (and those of first tiles nowhere).
    follows = jnp.append(~tiles.first[1:], False)
    moved = jnp.append(tiles.write_slot[1:], 0)
    inner = jnp.append(follows[1:], False)
    last = jnp.where(follows, 0, tiles.write_slot)
    write_slot = jnp.where(follows & inner, moved, last)
    return sound(entry, store, dataclasses.replace(tiles, write_slot=write_slot), **how)


# -- the decode program --


@fault(7, *in_step("commit"), compiles="decode")
def slot_is_not_noted(sound, rows, row_id, length, slot, emission, anchor):
    return sound(rows, row_id, length, rows.slot[row_id], emission, anchor)


@fault(8, *CONVOLUTION, compiles="decode")
def window_stays(sound, x, weight, bias, store, rows, **how):
    there = jnp.where(rows.read_slot[:, None] > 0, rows.read_slot[:, None], rows.write_slot)
    return sound(x, weight, bias, store, dataclasses.replace(rows, write_slot=there), **how)


# -- what the host fills in --


@fault(9)
def stale_decode_tail(patch: Patch) -> None:
    earlier: dict[str, np.ndarray] = {}

    @filling("decode")
    def change(self, batch, rows) -> None:
        names = ("row_id", "continues", "num_tokens", "length", "read_slot", "write_slot")
        now = {name: getattr(batch, name).copy() for name in names}
        for name, before in earlier.items():
            getattr(batch, name)[len(rows) :] = before[len(rows) :]
        earlier.update(now)

    change(patch)


@fault(10)
@filling("decode")
def padding_writes_a_live_slot(self, batch, rows):
    if rows[0].num_tokens:
        batch.num_tokens[len(rows) :] = 1
        batch.write_slot[len(rows) :] = batch.write_slot[0]


@fault(11)
@filling("decode")
def last_token_again(self, batch, rows):
    for i, row in enumerate(rows):
        if not row.num_tokens:
            batch.num_tokens[i], batch.tokens[i, 0] = 1, row.request.tokens[row.length - 1]
            batch.length[i] -= 1


@fault(12)
@filling("decode", "prefill")
def no_page_copy(self, batch, rows):
    batch.page_copy[:] = 0


@fault(13)
@filling("prefill")
def write_slots_one_tile_off(self, batch, rows):
    at = 0
    for row in rows:
        count = len(row.access.writes)
        batch.tile_write_slot[at : at + count - 1] = row.access.writes[1:]
        at += count


@fault(14)
def mixed_steps_skip_checkpoints(patch: Patch) -> None:
    mixed = [False]

    @filling("decode")
    def decoding(self, batch, rows) -> None:
        mixed[0] = True

    @filling("prefill")
    def change(self, batch, rows) -> None:
        at = 0
        for row in rows:
            count = len(row.access.writes)
            if mixed[0]:
                batch.tile_write_slot[at : at + count - 1] = 0
            at += count
        mixed[0] = False

    decoding(patch)
    change(patch)


@fault(15)
@filling("prefill")
def read_by_seat(self, batch, rows):
    for i, row in enumerate(rows):
        batch.read_slot[i] = row.row_id if row.length else 0


@fault(16, PageTables, "fill")
def stale_page_table(sound, self, updates, rows):
    for row in rows:
        row.pages.changed = min(len(row.pages), max(row.pages.changed, self._count[row.row_id]))
    sound(self, updates, rows)


# -- rows under a grammar that draft, and that sit out steps of their neighbors --

structured_fault = functools.partial(fault, table=STRUCTURED)


structured_fault(53)(no_sitting_out)


@structured_fault(54, HostOutput, "take_proposals")
def stale_proposals(sound, self):
    before = [(row.request.user, row.request.user.proposed) for row in self.rows]
    sound(self)
    for member, proposed in before:
        member.proposed = proposed or member.proposed


@structured_fault(55, HostOutput, "take_proposals")
def proposals_of_a_neighbor(sound, self):
    if self.proposed is not None:
        self.proposed = np.roll(self.proposed, 1, axis=0)
    sound(self)


# -- rows with adapters: scopes of keys, entries of LoRA matrices, and initial states --

adapter_fault = functools.partial(fault, table=ADAPTERS)


adapter_fault(56, Cache, "scope")(lambda sound, self, salt, adapter=None: sound(self, salt))


@adapter_fault(57)
def scope_by_name(patch: Patch) -> None:
    names, commit, scope = {}, AdapterTable.commit, Cache.scope

    def with_name(self, reserved):
        names[reserved.loading.digest] = reserved.loading.name
        return commit(self, reserved)

    patch.setattr(AdapterTable, "commit", with_name)
    patch.setattr(Cache, "scope", lambda self, salt, adapter=None: scope(self, salt, names.get(adapter)))


@adapter_fault(58)
def entry_of_the_row_before(patch: Patch) -> None:
    sound, last = BatchBuilder.seat, [0]

    def seat(self, *args, adapter=0, **how):
        before, last[0] = last[0], adapter
        return sound(self, *args, adapter=before, **how)

    patch.setattr(BatchBuilder, "seat", seat)


@adapter_fault(59, DecodeLayout, "with_adapters", compiles="decode")
@adapter_fault(60, PrefillLayout, "with_adapters", compiles="prefill")
def entry_of_a_neighbor(sound, self, entries):
    return sound(self, jnp.roll(entries, 1))


@adapter_fault(61)
def entries_in_use_are_overwritten(patch: Patch) -> None:
    sound = AdapterTable.take

    def take(self, request, content=None):
        loaded = sound(self, request, content)
        loaded.users = 0
        return loaded

    patch.setattr(AdapterTable, "take", take)
    patch.setattr(AdapterTable, "release", lambda self, adapter: None)


# Rows start from zeros; initial states are lost with the store.
adapter_fault(62, RowState, "__init__")(lambda sound, self, cache, slot: sound(self, cache, 0))
adapter_fault(63, InitialStates, "fill")(lambda sound, self, store: store)


# -- schedule-invariant engines: they change only bits --

bit_fault = functools.partial(fault, table=BITS)


@bit_fault(64, fixed_order, "product", compiles="step")
def another_order_for_few_rows(sound, rows, weight, **sizes):
    turned = slice(None, None, -1) if len(rows) < 3 else slice(None)
    return sound(rows[:, turned], weight[:, turned], **sizes)


@bit_fault(65, compiles="step")
def attention_in_pieces_by_batch(patch: Patch) -> None:
    def attention(q, kv, **layout):
        with pytest.MonkeyPatch.context() as short:
            short.setattr(attention_xla, "QUERIES", 16 if q.shape[0] > 3 else 128)
            return attention_xla.paged_attention(q, kv, **layout)

    patch.setattr(attention_api, "PAGED", fixed_order.implementations(attention, None))


@bit_fault(66, compiles="step")
def states_of_a_tile_at_once(patch: Patch) -> None:
    patch.setattr(recurrence_api, "SCAN", fixed_order.implementations(scan_xla.scan, None))


@bit_fault(67, compiles="step")
def another_last_bit_in_stored_states(patch: Patch) -> None:
    def scan(entry, store, tiles, **recurrence):
        y, store = native.scan(entry, store, tiles, **recurrence)
        return y, store.at[tiles.write_slot].set(jnp.nextafter(store[tiles.write_slot], jnp.inf))

    patch.setattr(recurrence_api, "SCAN", fixed_order.implementations(scan, None))
