"""A member's share of the packed tokens of a prefill step: the n-th of equal, contiguous parts.

What works per token sees the share alone. A recurrence or convolution gets all tokens of some of its heads or channels,
which do not depend on each other. Attention gets all queries, for the keys in the member's own pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.paged_attention import merge_attention_parts
from kernels_pallas.places import Packed
from kernels_pallas.slots import load, put, read_slots, write_slots
from mamba_jax.layout.base import Divisible, Inputs, Keys, Operation, Pages, Parameters, Queries, Span
from mamba_jax.layout.member import Member
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
        """Heads that do not divide are computed by each member."""
        if operation.shares is not None:
            return operation.shares(self, inputs, parameters, state)
        member, along = self.member, operation.divisible
        if along is None or not self._divides(along, inputs, state):
            y, state = operation.tiles(self.whole, tuple(map(member.gather, inputs)), parameters, state)
            return member.own(y), state
        given = tuple(member.gather(x) if i in along.shared else self._to_heads(x) for i, x in enumerate(inputs))
        here = jax.tree.map(lambda each: member.own(each, along.parameters), parameters)
        places, own = self._own_states(state, along)
        y, own = operation.tiles(replace(self.whole, packed=places), given, here, own)
        return member.exchange(y, split=0, concat=1), self._with_states(state, own, along)

    def _divides(self, along: Divisible, inputs: Inputs, state: Array) -> bool:
        count = self.member.count
        sizes = [x.shape[1] for i, x in enumerate(inputs) if i not in along.shared]
        return state.shape[along.state] % count == 0 and all(size % count == 0 or count % size == 0 for size in sizes)

    def _to_heads(self, x: Shaped[Array, "share heads ..."]) -> Shaped[Array, "T own ..."]:
        """Returns all tokens of this member's heads, or of the group that its heads share."""
        count = self.member.count
        if x.shape[1] % count == 0:
            return self.member.exchange(x, split=1, concat=0)
        group = self.member.index * x.shape[1] // count
        return lax.dynamic_slice_in_dim(self.member.gather(x), group, 1, axis=1)

    def _own_states(self, state: Array, along: Divisible) -> tuple[Packed, Array]:
        """Returns a small store of this member's heads, and the tokens' places with its slots: those that rows read
        come first, then one for each tile."""
        packed = self.whole.packed
        rows, tiles = len(packed.read_slot), packed.tiles
        read = self.member.own(read_slots(state, packed.read_slot), along.state)
        own = jnp.pad(read, ((1, len(packed.tile_row)), *[(0, 0)] * (read.ndim - 1)))
        places = replace(
            tiles,
            read_slot=jnp.where(tiles.read_slot > 0, 1 + packed.tile_row, 0),
            write_slot=jnp.where(tiles.write_slot > 0, 1 + rows + jnp.arange(len(packed.tile_row)), 0),
        )
        read_slot = jnp.where(packed.read_slot > 0, 1 + jnp.arange(rows), 0)
        return replace(packed, read_slot=read_slot, tiles=places), own

    def _with_states(self, state: Array, own: Array, along: Divisible) -> Array:
        """Returns the store with what the tiles have written, gathered over members."""
        # The number of rounds of a loop would be known on the device only, and a GPU may wait for the host in each.
        # A CPU's devices may begin the loop and an exchange outside in different orders, and wait for each other.
        at_once, each = (partial(run, along=along) for run in (self._write_at_once, self._write_each))
        written: Array = lax.platform_dependent(state, own, tpu=each, default=at_once)
        return written

    def _write_at_once(self, state: Array, own: Array, *, along: Divisible) -> Array:
        """Gathers the ends of all tiles, also of those that are not written."""
        packed = self.whole.packed
        ends = self.member.gather(own[1 + len(packed.read_slot) :], along.state)
        return write_slots(state, ends, packed.tiles.write_slot)

    def _write_each(self, state: Array, own: Array, *, along: Divisible) -> Array:
        packed = self.whole.packed
        target, rows = packed.tiles.write_slot, len(packed.read_slot)
        written = jnp.nonzero(target, size=len(target), fill_value=0)[0]

        def one(i: Int[Array, ""], state: Array) -> Array:
            tile = written[i]
            whole = self.member.gather(load(own, 1 + rows + tile), along.state - 1)
            return put(state, whole, target[tile])

        done: Array = lax.fori_loop(0, (target > 0).sum(), one, state)
        return done

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: Pages, span: Span) -> tuple[Queries, Pages]:
        member, whole = self.member, self.whole
        q, k = member.gather(q), member.gather(k)
        kv = whole.write_kv(k, None if v is None else member.gather(v), kv)
        parts = map(whole.by_token, member.part(whole.by_block(q), kv, **whole.places(*whole.query_blocks(), span)))
        found = (member.exchange(each, split=0, concat=0) for each in parts)
        out, lse = (each.reshape(member.count, 1, -1, *each.shape[1:]) for each in found)
        return merge_attention_parts(out, lse)[0].astype(q.dtype), kv
