"""Taking a resumption point out of a store and putting one in: a few small programs of fixed shapes.

What travels is a copy, because the next step gives the store itself away. A point is one state (`STATE` names its
arrays) and keys and values in *pieces*: arrays [layers, tokens, 2 * kv_heads, head_dim] of a few fixed sizes, so that
after a warm-up nothing compiles. Tokens, not pages, are what both sides agree on: their page sizes may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from mamba_jax.store import MambaSlots, Store, load, put, read_slots, take, write_slots
from mamba_jax.store_layout import is_pinned, places
from serving.disagg.arrangement import Arrangement

STATE = ("ssm", "conv_x", "conv_bc", "hidden")
"""Names and order of a state's arrays: [layers, heads, head_dim, state], [layers, window, inner], [layers, window, bc]
and [hidden]. A model without Mamba layers has the last one only."""

SIZES = (64, 16, 4, 1)
"""Pieces by the units that they hold."""

State = dict[str, Array]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + tokens) of a sequence, all of whose units are whole."""

    start: int
    tokens: int


def pieces(start: int, end: int, unit: int) -> list[Piece]:
    """Cover the tokens [start, end) with as few pieces as there are sizes for. Both ends are widened to whole units.

    `unit` is a multiple of both sides' page sizes.
    """
    if start >= end:
        return []
    at, last = start // unit, -(-end // unit)
    found = []
    while at < last:
        size = next(size for size in SIZES if size <= last - at)
        found.append(Piece(at * unit, size * unit))
        at += size
    return found


def common_unit(page_size: int, other: int) -> int:
    """The smallest number of tokens that fills whole pages on both sides. Without attention (0) any will do."""
    return math.lcm(page_size or 1, other or 1)


class PointPrograms:
    """The compiled programs of one store. They are compiled when first needed, or before by `warm_up`."""

    def __init__(self, arrangement: Arrangement | None = None) -> None:
        self.arrangement = arrangement or Arrangement()
        self._compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    # -- out --

    def read_state(self, store: Store, slot: int) -> State:
        """A copy of the state in a slot."""
        arguments = (store, np.int32(slot))
        program = self._program("read_state", (), partial(_read_state, self.arrangement), arguments)
        return _first_device(program(*arguments))

    def read_piece(self, store: Store, pages: Sequence[int], count: int, layers: int) -> Array:
        """A copy of the keys and values in some pages, of the first `layers` layers.

        Only the first `count` tokens mean anything: what lies behind them is sent as zeros.
        """
        table = np.asarray(pages, np.int32)
        arguments = (store, table, np.int32(count))
        read = partial(_read_piece, self.arrangement, layers)
        program = self._program("read_piece", (layers, len(table)), read, arguments)
        return _first_device(program(*arguments))

    # -- in --

    def write_state(self, store: Store, slot: int, state: State, position: int) -> Store:
        """The store (given away) with a state in a slot, which then holds S(position)."""
        arguments = (store, _for_store(store, state), np.int32(slot), np.int32(position))
        dtypes = tuple(str(leaf.dtype) for leaf in state.values())
        program = self._program("write_state", dtypes, partial(_write_state, self.arrangement), arguments, donate=True)
        return program(*arguments)

    def write_piece(self, store: Store, pages: Sequence[int], piece: Array) -> Store:
        """The store (given away) with a piece in some pages; page 0 = not wanted."""
        table = np.asarray(pages, np.int32)
        arguments = (store, _for_store(store, piece), table)
        key = (piece.shape, str(piece.dtype))
        program = self._program("write_piece", key, partial(_write_piece, self.arrangement), arguments, donate=True)
        return program(*arguments)

    def warm_up(
        self, store: Store, *, unit: int, layers: int, reading: bool, state: dict[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Compile all that one role needs; nothing is run. `state` are the arrays of a state as they come."""
        for size in SIZES if store.kv else ():
            table = np.zeros(size * unit // store.page_size, np.int32)
            if reading:
                read = partial(_read_piece, self.arrangement, layers)
                self._program("read_piece", (layers, len(table)), read, (store, table, np.int32(0)))
            else:
                kv2, head_dim = self.kv_shape(store)
                shape = (layers, size * unit, kv2, head_dim)
                piece = jax.ShapeDtypeStruct(shape, store.kv[0].dtype, sharding=_whole(store))
                key = (shape, str(piece.dtype))
                write = partial(_write_piece, self.arrangement)
                self._program("write_piece", key, write, (store, piece, table), donate=True)
        zero = np.int32(0)
        if reading:
            self._program("read_state", (), partial(_read_state, self.arrangement), (store, zero))
        else:
            whole = _whole(store)
            specs = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole) for name, leaf in state.items()}
            dtypes = tuple(str(leaf.dtype) for leaf in state.values())
            write = partial(_write_state, self.arrangement)
            self._program("write_state", dtypes, write, (store, specs, zero, zero), donate=True)

    def kv_shape(self, store: Store) -> tuple[int, int]:
        """2 * logical heads of keys and values, and their size."""
        return store.kv[0].shape[2] // self.arrangement.kv_repeat, store.kv[0].shape[3]

    def _program(
        self, name: str, key: tuple[Any, ...], run: Callable[..., Any], arguments: tuple[Any, ...], donate: bool = False
    ) -> jax.stages.Compiled:
        store: Store = arguments[0]
        full = (name, key, store.num_slots, store.num_pages, store.page_size, len(store.kv), store.tags is None)
        compiled = self._compiled.get(full)
        if compiled is None:
            sharding = store.hidden.sharding
            options: dict[str, Any] = {"donate_argnums": (0,)} if donate else {}
            if isinstance(sharding, NamedSharding) or is_pinned(store):
                options["out_shardings"] = places(store) if donate else _whole(store)
            compiled = self._compiled[full] = jax.jit(run, **options).lower(*arguments).compile()
        return compiled


def state_spec(store: Store, arrangement: Arrangement) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a state of this store as it travels, in the order of `STATE`."""
    spec = jax.eval_shape(partial(_read_state, arrangement), store, jax.ShapeDtypeStruct((), jnp.int32))
    return {name: spec[name] for name in STATE if name in spec}


def _read_state(arrangement: Arrangement, store: Store, slot: Int[Array, ""]) -> State:
    state = {}
    if store.mamba:
        state["ssm"] = jnp.stack([take(slots.ssm, slot) for slots in store.mamba])
        state["conv_x"] = jnp.stack([take(slots.conv_x, slot) for slots in store.mamba])
        state["conv_bc"] = arrangement.bc_out(jnp.stack([take(slots.conv_bc, slot) for slots in store.mamba]))
    state["hidden"] = take(store.hidden, slot)
    return state


def _read_piece(
    arrangement: Arrangement, layers: int, store: Store, pages: Int[Array, " n"], count: Int[Array, ""]
) -> Array:
    tokens = len(pages) * store.page_size
    there = (jnp.arange(tokens) < count)[:, None, None]
    read = []
    for kv in store.kv[:layers]:
        flat = arrangement.kv_out(read_slots(kv, pages)).reshape(tokens, -1, kv.shape[-1])
        read.append(jnp.where(there, flat, jnp.zeros((), kv.dtype)))
    return jnp.stack(read)


def _write_state(
    arrangement: Arrangement, store: Store, state: State, slot: Int[Array, ""], position: Int[Array, ""]
) -> Store:
    mamba = []
    for layer, slots in enumerate(store.mamba):
        window = arrangement.bc_in(state["conv_bc"][layer])
        mamba.append(
            MambaSlots(
                ssm=put(slots.ssm, state["ssm"][layer], slot),
                conv_x=put(slots.conv_x, state["conv_x"][layer], slot),
                conv_bc=put(slots.conv_bc, window, slot),
            )
        )
    tags = store.tags
    if tags is not None:
        times = load(tags, slot)[0] + 1
        tags = put(tags, jnp.stack([times, position]), slot)
    hidden = put(store.hidden, state["hidden"], slot)
    return replace(store, mamba=tuple(mamba), hidden=hidden, tags=tags)


def _write_piece(arrangement: Arrangement, store: Store, piece: Array, pages: Int[Array, " n"]) -> Store:
    count = len(pages)
    paged = piece.reshape(-1, store.page_size, *piece.shape[2:])

    def at_once(layer: int, kv: Array, paged: Array, pages: Array) -> Array:
        return write_slots(kv, arrangement.kv_in(paged[layer * count :][:count]), pages)

    def one_by_one(layer: int, kv: Array, paged: Array, pages: Array) -> Array:
        # Straight out of the piece: one layer's part of it would be copied on the way, which takes XLA:CPU longer than
        # all the rest. So would a conditional for what is not wanted; hence those that are come first.
        wanted = jnp.nonzero(pages > 0, size=count, fill_value=0)[0]

        def write(i: Int[Array, ""], kv: Array) -> Array:
            return put(kv, arrangement.kv_in(load(paged, layer * count + wanted[i])), pages[wanted[i]])

        return jax.lax.fori_loop(0, (pages > 0).sum(), write, kv)

    written = [
        jax.lax.platform_dependent(kv, paged, pages, cpu=partial(one_by_one, layer), default=partial(at_once, layer))
        for layer, kv in enumerate(store.kv)
    ]
    return replace(store, kv=tuple(written))


def _whole(store: Store) -> jax.sharding.Sharding:
    """Where whole arrays lie for this store: on each device of its mesh, or on its only device."""
    sharding = store.hidden.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _for_store(store: Store, tree: Any) -> Any:
    whole = _whole(store)

    def move(leaf: Any) -> Array:
        # What lies there already, as what the transfer engine brings does, is not worth the call.
        return leaf if getattr(leaf, "sharding", None) == whole else jax.device_put(leaf, whole)

    return jax.tree.map(move, tree)


def _first_device(tree: Any) -> Any:
    """Whole arrays that several devices have, on the first of them alone."""

    def pick(leaf: Array) -> Array:
        return leaf.addressable_shards[0].data if len(leaf.sharding.device_set) > 1 else leaf

    return jax.tree.map(pick, tree)
