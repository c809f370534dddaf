"""A recurrence of all heads over a member's own tokens, where heads are too few for the members or links are slow.

A row may continue from one share to the next ones. A share changes the state S before it to T(S) + B, where B is the
state that it reaches from zeros (or, if the row begins there, the state it reaches). Members exchange T and B of the
last row of their shares, apply those of earlier members in order, and scan again from the state that this gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.fixed_order import is_fixed
from kernels_pallas.slots import read_slots, take
from mamba_jax.layout.base import Inputs, Operation, Parameters, Transition
from mamba_jax.layout.member import Member
from mamba_jax.layout.prefill import PrefillLayout

OfTiles = Callable[[Array], Array]
"""Returns what an array of all tiles has for some of them."""


def transition_of(operation: Operation, state: Any) -> Transition | None:
    """Returns what pairs need of an operation; None: it does not work by pairs."""
    # What is rounded at tiles' ends is not linear, and pairs add in another order than the scan.
    found = None if operation.divisible is None or is_fixed() else operation.divisible.transition
    return found if found and (found.copies or state.dtype == jnp.float32) else None


def exchanges_less(transition: Transition, inputs: Any, state: Any, whole: PrefillLayout, members: int) -> bool:
    """Whether pairs exchange fewer bytes than heads; shapes decide, roughly.

    By heads, a member receives a share of the inputs and of the output, which is like the largest input, and the states
    that are written. By pairs, of each member a state and a transition, which is as large if it takes scans, and the
    written states twice, because they are added up.
    """
    states = members * (1 + transition.scans) + len(whole.written)
    given = [each.size * each.dtype.itemsize for each in jax.tree.leaves(inputs)]
    return bool(states * state.size // len(state) * state.dtype.itemsize < sum(given) + max(given))


def is_less_work(transition: Transition, whole: PrefillLayout, members: int) -> bool:
    """Whether all scans of a member's pieces of tiles are of fewer tiles than one scan of all tokens; shapes decide.

    They are not with few members, or with many rows for the tokens.
    """
    return (2 + transition.scans) * most_pieces(whole, members) < len(whole.packed.tile_row)


def most_pieces(whole: PrefillLayout, members: int) -> int:
    """Returns how many pieces of tiles a member's tokens can have: each row has at most two incomplete ones."""
    (tiles, size), rows = whole.packed.tile_tokens.shape, len(whole.packed.read_slot)
    return min(tiles, (len(whole.packed.token_row) // members + 2 * rows * (size - 1)) // size)


def scan_share(
    operation: Operation, transition: Transition, inputs: Inputs, parameters: Parameters,
    state: Float[Array, "slots ..."], whole: PrefillLayout, member: Member,
) -> tuple[Array, Callable[[OfTiles], Array]]:  # fmt: skip
    """Returns y of this member's tokens, and a function that exchanges the states after tiles.

    inputs: of this member's tokens.
    """
    own, piece = own_tiles(whole, member)
    read = read_slots(state, whole.packed.read_slot)
    rows, zeros = len(read), jnp.zeros(read.shape[1:], read.dtype)
    row = whole.packed.token_row.reshape(member.count, -1)
    continues = row[:, 0] == jnp.append(-1, row[:-1, -1])
    continued_row = (jnp.arange(rows) == row[member.index, 0]) & continues[member.index]
    last = own.packed.token_in_tiles[-1] // own.packed.tile_tokens.shape[1]

    def scan(inputs: Inputs, start: Float[Array, "rows ..."]) -> tuple[Array, Float[Array, "tiles ..."]]:
        store = jnp.pad(start, ((1, len(own.packed.tile_row)), *[(0, 0)] * (start.ndim - 1)))
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
    y, ends = scan_from(before)

    def after(of: OfTiles) -> Array:
        here = of(piece)
        mine = (here >= 0).reshape(-1, *[1] * before.ndim)
        states: Array = lax.psum(jnp.where(mine, take(ends, here), 0), member.axis)
        return states

    return y, after


def own_tiles(whole: PrefillLayout, member: Member) -> tuple[PrefillLayout, Int[Array, " tiles"]]:
    """Returns the layout of a member's tokens, and the index of its piece that ends each tile; -1: another member's.

    The layout's slots are those of a small store: null, one to read for each row, one to write for each tile.
    """
    packed = whole.packed
    size, rows, most = packed.tile_tokens.shape[1], len(packed.read_slot), most_pieces(whole, member.count)
    row, valid, positions = map(member.own, (packed.token_row, whole.valid, whole.positions))
    in_row = (row[:, None] == jnp.arange(rows)) & valid[:, None]
    own = PrefillLayout.of(
        num_packed=len(row), tile_size=size, length=positions[in_row.argmax(axis=0)], num_tokens=in_row.sum(axis=0),
        read_slot=1 + jnp.arange(rows), tile_write_slot=1 + rows + jnp.arange(most), page_table=whole.page_table,
    )  # fmt: skip
    end = jnp.where(packed.tile_valid, packed.tile_tokens, 0).max(axis=1)
    piece = own.packed.token_in_tiles[end % len(row)] // size
    return own, jnp.where(end // len(row) == member.index, piece, -1)
