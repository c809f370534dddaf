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

from kernels_pallas.gated_recurrence import xla as between
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.modules import conv as conv_module
from serving.engine.steps.batching import BatchBuilder
from serving.engine.steps.page_tables import PageTables
from tests.serving.core.mutations.registry import Fault, Patch, mutation

STEP = [
    importlib.import_module(f"mamba_jax.{part}")
    for part in ("programs", "step.run", "step.decode", "step.prefill", "step.heads", "step.running_rows", "step.seats")
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
"""Those of rows held by anchors, which draft too: see `replay_faults`."""
STRUCTURED: dict[int, Fault] = {}
"""Those of rows under a grammar that draft: see `structured_faults`."""
ADAPTERS: dict[int, Fault] = {}
"""Those of rows with adapters: see `adapter_faults`."""
BITS: dict[int, Fault] = {}
"""Those that change only bits: see `bit_faults`."""


def planted() -> dict[int, Fault]:
    """All of them."""
    return DEVICE | DRAFTS | REPLAY | STRUCTURED | ADAPTERS | BITS


def fault(number: int, *where: Any, compiles: str | None = None, table: dict[int, Fault] = DEVICE):
    """Register a fault of the device's side, as `mutation` does those of the host."""
    assert number not in planted()
    return mutation(number, *where, table=table, kind="D", compiles=compiles)


def after_filling(patch: Patch, method: str, change: Callable) -> None:
    """`change(builder, batch, rows)` after each batch that `method` has filled."""
    sound = getattr(BatchBuilder, method)

    def fill(self, rows):
        batch = sound(self, rows)
        change(self, batch, rows)
        return batch

    patch.setattr(BatchBuilder, method, fill)


def filling(method: str) -> Callable[[Callable], Callable[[Patch], None]]:
    """Makes a plant of `change(builder, batch, rows)`: see `after_filling`."""

    def decorate(change: Callable) -> Callable[[Patch], None]:
        return functools.wraps(change)(lambda patch: after_filling(patch, method, change))

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


@fault(5, *in_step("write_hidden"), compiles="prefill")
def no_hidden_state(sound, store, *_):
    return store


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


def _stale_tails(patch: Patch, method: str, names: tuple[str, ...]) -> None:
    earlier: dict[str, np.ndarray] = {}

    def change(self, batch, rows) -> None:
        now = {name: getattr(batch, name).copy() for name in names}
        for name in names:
            if name in earlier:
                getattr(batch, name)[len(rows) :] = earlier[name][len(rows) :]
        earlier.update(now)

    after_filling(patch, method, change)


@fault(9)
def stale_decode_tail(patch: Patch) -> None:
    names = ("row_id", "continues", "num_tokens", "length", "read_slot", "write_slot")
    _stale_tails(patch, "decode", names)


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
def no_page_copy(patch: Patch) -> None:
    def change(self, batch, rows) -> None:
        batch.page_copy[:] = 0

    after_filling(patch, "decode", change)
    after_filling(patch, "prefill", change)


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

    def decoding(self, batch, rows) -> None:
        mixed[0] = True

    def change(self, batch, rows) -> None:
        at = 0
        for row in rows:
            count = len(row.access.writes)
            if mixed[0]:
                batch.tile_write_slot[at : at + count - 1] = 0
            at += count
        mixed[0] = False

    after_filling(patch, "decode", decoding)
    after_filling(patch, "prefill", change)


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
