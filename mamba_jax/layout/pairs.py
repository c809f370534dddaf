"""A recurrence of all heads over a member's own tokens, where heads are too few for the members.

A row may continue from one share to the next ones. A share changes the state S before it to T(S) + B, where B is the
state that it reaches from zeros (or, if the row begins there, the state it reaches). Members exchange T and B of the
last row of their shares, apply those of earlier members in order, and scan again from the state that this gives.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.slots import read_slots
from mamba_jax.layout.base import Inputs, Operation, Parameters, Transition
from mamba_jax.layout.member import Member
from mamba_jax.layout.prefill import PrefillLayout

LEAST_MEMBERS = 4
"""With fewer, the two or three scans of a share are no less work than one scan of all tokens."""


def scan_share(
    operation: Operation, transition: Transition, inputs: Inputs, parameters: Parameters,
    state: Float[Array, "slots ..."], whole: PrefillLayout, member: Member,
) -> tuple[Array, Float[Array, "tiles ..."], Int[Array, " tiles"]]:  # fmt: skip
    """Returns y of this member's tokens, the states after its pieces of tiles, and the slots these belong in (0: none).

    inputs: of this member's tokens.
    """
    own, target = own_tiles(whole, member)
    read = read_slots(state, whole.packed.read_slot)
    rows, zeros = len(read), jnp.zeros(read.shape[1:], read.dtype)
    row = whole.packed.token_row.reshape(member.count, -1)
    continues = row[:, 0] == jnp.append(-1, row[:-1, -1])
    continued_row = (jnp.arange(rows) == row[member.index, 0]) & continues[member.index]
    last = own.packed.token_in_tiles[-1] // own.packed.tile_tokens.shape[1]

    def scan(inputs: Inputs, start: Float[Array, "rows ..."]) -> tuple[Array, Float[Array, "tiles ..."]]:
        store = jnp.pad(start, ((1, len(target)), *[(0, 0)] * (start.ndim - 1)))
        y, store = operation.tiles(own, inputs, parameters, store)
        return y, store[1 + rows :]

    def end(inputs: Inputs, start: Array) -> Array:
        return scan(inputs, jnp.broadcast_to(start, (rows, *start.shape)))[1][last]

    def scan_from(before: Array) -> tuple[Array, Array]:
        return scan(inputs, jnp.where(continued_row.reshape(-1, *[1] * before.ndim), before, read))

    def pass_one(before: Array, of_member: tuple[Array, ...]) -> tuple[Array, None]:
        index, passes, change, reached = of_member
        after = jnp.where(passes, transition.apply(change, parameters, before), 0) + reached
        return jnp.where(index < member.index, after, before), None

    pair = transition.of(inputs, end), scan_from(zeros)[1][last]
    passes = continues & (row[:, 0] == row[:, -1])
    every: Any = jnp.arange(member.count), passes, *(member.gather(each[None]) for each in pair)
    before, _ = lax.scan(pass_one, zeros, every)
    return *scan_from(before), target


def own_tiles(whole: PrefillLayout, member: Member) -> tuple[PrefillLayout, Int[Array, " tiles"]]:
    """Returns the layout of a member's tokens, and the slot for the state after each of its pieces of tiles; 0: none.

    The layout's slots are those of a small store: null, one to read for each row, one to write for each tile.
    """
    packed = whole.packed
    (tiles, size), rows = packed.tile_tokens.shape, len(packed.read_slot)
    row, place, valid, positions = map(
        member.own, (packed.token_row, packed.token_in_tiles, whole.valid, whole.positions)
    )
    in_row = (row[:, None] == jnp.arange(rows)) & valid[:, None]
    most = min(tiles, (len(row) + 2 * rows * (size - 1)) // size)  # a row has at most two incomplete ones
    own = PrefillLayout.of(
        num_packed=len(row), tile_size=size, length=positions[in_row.argmax(axis=0)], num_tokens=in_row.sum(axis=0),
        read_slot=1 + jnp.arange(rows), tile_write_slot=1 + rows + jnp.arange(most), page_table=whole.page_table,
    )  # fmt: skip
    ends_tile = valid & (place % size + 1 == packed.tile_valid.sum(axis=1)[place // size])
    slot_after = jnp.where(ends_tile, packed.tiles.write_slot[place // size], 0)
    return own, own.by_tile(slot_after).max(axis=1)
