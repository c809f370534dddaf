"""A member's share of the packed tokens of a prefill step: the n-th of equal, contiguous parts.

What works per token sees the share alone. A recurrence or convolution gets all tokens of some of its heads or channels,
which do not depend on each other (`pairs` if these are too few, or links are slow). Attention gets all queries, for the
keys in the member's own pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.paged_attention import merge_attention_parts
from kernels_pallas.places import Packed
from kernels_pallas.slots import load, put, read_slots, take, write_slots
from mamba_jax.layout.base import Along, Divisible, Inputs, Keys, Operation, Pages, Parameters, Queries, Span
from mamba_jax.layout.member import Member
from mamba_jax.layout.pairs import OfTiles, exchanges_less, is_less_work, scan_share, transition_of
from mamba_jax.layout.prefill import PrefillLayout


@dataclass(frozen=True)
class ShareLayout:
    """A share of the tokens of `whole`, the layout of all tokens on this member."""

    whole: PrefillLayout
    member: Member

    @property
    def positions(self) -> Int[Array, " T"]:
        return self.member.own(self.whole.positions)

    @property
    def valid(self) -> Bool[Array, " T"]:
        return self.member.own(self.whole.valid)

    @property
    def adapter(self) -> Int[Array, " T"] | None:
        return None if self.whole.adapter is None else self.member.own(self.whole.adapter)

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        """Heads that do not divide by members are scanned by pairs, or computed by each member. Those that divide are
        also scanned by pairs where links are slow and pairs exchange less."""
        if operation.shares is not None:
            return operation.shares(self, inputs, parameters, state)
        member, along = self.member, operation.divisible
        divides = along is not None and self._divides(along, (inputs, parameters, state))
        if along is not None and divides and not self.prefers_pairs(operation, inputs, state):
            return self.by_heads(operation.tiles, along, inputs, parameters, state)
        transition = transition_of(operation, state)
        if transition and (divides or is_less_work(transition, self.whole, member.count)):
            y, after = scan_share(operation, transition, inputs, parameters, state, self.whole, member)
            return y, self._with_states(state, after)
        y, state = operation.tiles(self.whole, jax.tree.map(member.gather, inputs), parameters, state)
        return member.own(y), state

    def prefers_pairs(self, operation: Operation, inputs: Any, state: Any) -> bool:
        """Whether an operation works by pairs although its heads divide by members."""
        transition = transition_of(operation, state) if self.whole.slow_links else None
        return bool(transition and exchanges_less(transition, inputs, state, self.whole, self.member.count))

    def by_heads(
        self, tiles: Callable[..., Any], along: Divisible, inputs: Any, parameters: Any, state: Any
    ) -> tuple[Array, Any]:
        """Runs a form `tiles` with all tokens of this member's heads; their numbers divide by that of members."""
        given = _each(self._to_heads, along.inputs, inputs)
        here = _each(partial(_by_parts, self.member.own), along.parameters, parameters)
        places, own = self._own_states(state, along)
        y, own = tiles(replace(self.whole, packed=places), given, here, own)
        ends = jax.tree.map(lambda own: own[1 + len(places.read_slot) :], own)

        def after(of: OfTiles) -> Any:
            return _each(partial(_by_parts, self.member.gather), along.state, jax.tree.map(of, ends))

        return self.member.exchange(y, split=0, concat=1), self._with_states(state, after)

    def _divides(self, along: Divisible, given: Any) -> bool:
        def divides(x: Array, along: Along) -> bool:
            return along.axis is None or x.shape[along.axis] % (along.parts * self.member.count) == 0

        return all(jax.tree.leaves(_each(divides, (along.inputs, along.parameters, along.state), given)))

    def _to_heads(self, x: Shaped[Array, "share ..."], along: Along) -> Shaped[Array, "T ..."]:
        """Returns all tokens of this member's heads, or of what they share."""
        if along.axis is None:
            return self.member.gather(x)
        return _by_parts(lambda x, axis: self.member.exchange(x, split=axis, concat=0), x, along)

    def _own_states(self, state: Any, along: Divisible) -> tuple[Packed, Any]:
        """Returns a small store of this member's heads, and the tokens' places with its slots: those that rows read
        come first, then one for each tile."""
        packed = self.whole.packed
        rows, tiles = len(packed.read_slot), packed.tiles

        def small(state: Array, along: Along) -> Array:
            read = _by_parts(self.member.own, read_slots(state, packed.read_slot), along)
            return jnp.pad(read, ((1, len(packed.tile_row)), *[(0, 0)] * (read.ndim - 1)))

        places = replace(
            tiles,
            read_slot=jnp.where(tiles.read_slot > 0, 1 + packed.tile_row, 0),
            write_slot=jnp.where(tiles.write_slot > 0, 1 + rows + jnp.arange(len(packed.tile_row)), 0),
        )
        read_slot = jnp.where(packed.read_slot > 0, 1 + jnp.arange(rows), 0)
        return replace(packed, read_slot=read_slot, tiles=places), _each(small, along.state, state)

    def _with_states(self, state: Any, after: Callable[[OfTiles], Any]) -> Any:
        """Returns the store with the states after tiles; `after` exchanges those of some tiles."""
        # The number of rounds of a loop would be known on the device only, and a GPU may wait for the host in each.
        # A CPU's devices may begin the loop and an exchange outside in different orders, and wait for each other.
        at_once, each = (partial(run, after=after) for run in (self._write_at_once, self._write_each))
        return lax.platform_dependent(state, tpu=each, default=at_once)

    def _write_at_once(self, state: Any, *, after: Callable[[OfTiles], Any]) -> Any:
        """Exchanges the ends of as many tiles as a step may write."""
        target, written = self.whole.packed.tiles.write_slot, self.whole.written
        slots = jnp.where(jnp.arange(len(written)) < (target > 0).sum(), target[written], 0)
        found = after(lambda ends: take(ends, written))
        return jax.tree.map(lambda state, ends: write_slots(state, ends, slots), state, found)

    def _write_each(self, state: Any, *, after: Callable[[OfTiles], Any]) -> Any:
        target, written = self.whole.packed.tiles.write_slot, self.whole.written

        def one(i: Int[Array, ""], state: Any) -> Any:
            found = after(lambda ends: load(ends, written[i])[None])
            return jax.tree.map(lambda state, end: put(state, end[0], target[written[i]]), state, found)

        return lax.fori_loop(0, (target > 0).sum(), one, state)

    def write_kv(self, k: Keys, v: Keys | None, kv: Pages) -> Pages:
        """Returns the member's pages with the keys and values of all tokens, of which it has those of its share."""
        return self.whole.write_kv(self.member.gather(k), None if v is None else self.member.gather(v), kv)

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: Pages, span: Span) -> tuple[Queries, Pages]:
        member, whole = self.member, self.whole
        q, kv = member.gather(q), self.write_kv(k, v, kv)
        parts = map(whole.by_token, member.part(whole.by_block(q), kv, **whole.places(*whole.query_blocks(), span)))
        found = (member.exchange(each, split=0, concat=0) for each in parts)
        out, lse = (each.reshape(member.count, 1, -1, *each.shape[1:]) for each in found)
        return merge_attention_parts(out, lse)[0].astype(q.dtype), kv


def _each(run: Callable[[Array, Along], Any], along: Any, arrays: Any) -> Any:
    """Returns `run(array, along)` of each array; `along` is one for all, or a tree of them."""
    return jax.tree.map(lambda along, part: jax.tree.map(lambda x: run(x, along), part), along, arrays)


def _by_parts(run: Callable[[Array, int], Array], x: Array, along: Along) -> Array:
    """Returns `run(x, axis)` of each of the arrays along the axis; x itself if heads share it."""
    if along.axis is None:
        return x
    axis = along.axis % x.ndim
    if along.parts == 1:
        return run(x, axis)
    y = run(x.reshape(*x.shape[:axis], along.parts, -1, *x.shape[axis + 1 :]), axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])
