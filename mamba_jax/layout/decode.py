"""The tokens of a decode step: rows of equal width, one recurrent step after the other.

Rows may have an anchor and the inputs since then (see `mamba_jax.store`), or be a block that is drafted in one pass.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.places import Anchored, Rows
from kernels_pallas.tails import read_ring, write_ring
from mamba_jax.layout.base import Inputs, Operation, Pages, Parameters, Queries, Span
from mamba_jax.layout.paged import PagedTokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeLayout(PagedTokens):
    """D rows x S steps, T = D * S: a row's tokens come first, padding after them."""

    write_slot: Int[Array, "rows writes"]
    """0 for padding. One for each step."""

    @classmethod
    def of(
        cls,
        *,
        length: Int[Array, " rows"],
        num_tokens: Int[Array, " rows"],
        read_slot: Int[Array, " rows"],
        write_slot: Int[Array, "rows steps"],
        page_table: Int[Array, "rows pages"],
    ) -> Self:
        """Returns the layout of rows that have absorbed `length` tokens and are fed `num_tokens` more."""
        step = jnp.arange(write_slot.shape[1])
        valid = step < num_tokens[:, None]
        return cls(
            positions=jnp.where(valid, length[:, None] + step, -1).reshape(-1),
            valid=valid.reshape(-1),
            # A row without tokens (padding, or one that only samples) must not move any state about.
            read_slot=jnp.where(num_tokens > 0, read_slot, 0),
            write_slot=jnp.where(valid, write_slot, 0),
            page_table=page_table,
        )

    @classmethod
    def in_pages(
        cls, *, length: Int[Array, " rows"], num_tokens: Int[Array, " rows"], page_table: Array, steps: int
    ) -> Self:
        """Returns the layout of such rows without states: the draft layers' have keys and values only."""
        none = jnp.zeros((len(length), steps), jnp.int32)
        return cls.of(
            length=length, num_tokens=num_tokens, read_slot=none[:, 0], write_slot=none, page_table=page_table
        )

    def with_adapters(self, entry: Int[Array, " rows"]) -> Self:
        """Returns the layout of rows that have these adapters."""
        return replace(self, adapter=jnp.repeat(entry, self.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and steps."""
        rows = self.read_slot.shape[0]
        return rows, self.positions.shape[0] // rows

    @property
    def rows(self) -> Rows:
        """The places of the rows' states."""
        return Rows(self.read_slot, self.write_slot)

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        return operation.rows(self, inputs, parameters, state)

    def row_of_each(self) -> Int[Array, " T"]:
        count, steps = self.shape
        return jnp.repeat(jnp.arange(count), steps)

    def query_blocks(self) -> tuple[Int[Array, "rows steps"], Int[Array, " rows"]]:
        return self.by_block(self.positions), jnp.arange(self.shape[0])

    def by_row(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "rows steps ..."]:
        """Packed tokens by rows. Padding is zeros."""
        valid = self.valid.reshape(-1, *[1] * (x.ndim - 1))
        return self.by_block(jnp.where(valid, x, 0))

    def by_token(self, rows: Shaped[Array, "rows steps ..."]) -> Shaped[Array, "T ..."]:
        """Converts rows back to packed tokens."""
        return rows.reshape(-1, *rows.shape[2:])

    def by_block(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "rows steps ..."]:
        return x.reshape(*self.shape, *x.shape[1:])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplayLayout(DecodeLayout):
    """A `DecodeLayout` of rows that have anchors. Its `write_slot` [rows, 1] is the spare slot."""

    anchored: Anchored
    """The places of the rows' anchors and tails."""

    @classmethod
    def from_anchor(
        cls, *, steps: int, write_slot: Array, tail_id: Array, anchor: Array, interval: int, **rows: Array
    ) -> Self:
        """Returns the layout of rows that have absorbed `length` tokens, `anchor` of them in their slots.

        `rows`: length, num_tokens, read_slot and page_table, as `DecodeLayout.of` takes them.
        """
        places = DecodeLayout.of(write_slot=jnp.zeros((len(tail_id), steps), jnp.int32), **rows)
        numbers = anchor, rows["length"], rows["num_tokens"], write_slot[:, 0]
        anchored = Anchored(places.read_slot, tail_id, *numbers, interval)
        return cls(**vars(places) | {"write_slot": write_slot}, anchored=anchored)

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        assert operation.replay is not None, "an operation that has no form for replay"
        return operation.replay(self, inputs, parameters, state)

    def append(
        self, ring: Shaped[Array, "tails entries *shape"], values: Shaped[Array, "rows steps *shape"]
    ) -> Shaped[Array, "tails entries *shape"]:
        """Returns the tails with the step's own tokens."""
        position = self.anchored.length[:, None] + jnp.arange(values.shape[1])
        return write_ring(ring, values, self.anchored.tail_id, position, self.by_block(self.valid))

    def is_tail_right(self, tags: Int[Array, "tails entries"]) -> Bool[Array, " rows"]:
        """For debugging: whether the tail holds exactly the tokens since the anchor, and has room for the step's."""
        places, entries = self.anchored, tags.shape[1]
        position = places.anchor_length[:, None] + jnp.arange(entries)
        there = position < places.length[:, None]
        held = read_ring(tags, places.tail_id, position)
        longest = places.length + places.num_tokens - places.anchor_length
        fits = (places.anchor_length <= places.length) & (longest <= entries)
        return fits & (~there | (held == position)).all(axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockLayout(DecodeLayout):
    """A `DecodeLayout` in which each token attends to all tokens of its row, later ones included."""

    def read_kv(self, q: Queries, kv: Pages, span: Span) -> Queries:
        """Attention of the tokens to the keys and values in their rows' pages, up to the block's last token.

        With a window, a token also sees the later tokens of its block, and all of these lie in the window.
        """
        rows, steps = self.shape
        groups, head_dim = kv.shape[2] // 2, q.shape[2]
        # The tokens of a row see the same keys: to the operation they are further heads of one query, which groups of
        # heads share keys as before. It then reads each key once.
        by_group = q.reshape(rows, steps, groups, -1, head_dim).swapaxes(1, 2)

        def read(part: Array, window: int | None) -> Array:
            last = self.positions.reshape(rows, steps).max(axis=1, keepdims=True)
            own = replace(span, window=window)
            out = self.attention(part.reshape(rows, 1, -1, head_dim), kv, last, jnp.arange(rows), own)
            return out.reshape(part.shape)

        if span.window is None:
            out = read(by_group, None)
        else:  # a window for each token, which all end at the block's last token
            windows = [span.window + steps - 1 - j for j in range(steps)]
            out = jnp.concatenate([read(by_group[:, :, j : j + 1], each) for j, each in enumerate(windows)], axis=2)
        return out.swapaxes(1, 2).reshape(q.shape)
