"""The tokens of a decode step: rows of equal width, one recurrent step after the other."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.paged_attention import paged_attention, write_kv
from kernels_pallas.places import Rows
from kernels_pallas.slots import write_slots
from mamba_jax.layout.operation import Operation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeLayout:
    """D rows x S steps, T = D * S: a row's tokens come first, padding after them."""

    positions: Int[Array, " T"]
    """Absolute; -1 = padding."""
    valid: Bool[Array, " T"]
    read_slot: Int[Array, " rows"]
    """The slot of the state before the step; 0 = zeros, and for rows without tokens."""
    write_slot: Int[Array, "rows writes"]
    """0 for padding. One for each step."""
    page_table: Int[Array, "rows pages"]
    adapter: Int[Array, " T"] | None = field(default=None, kw_only=True)
    """Entry of each token's adapter, 0 = none; None for a model without adapters."""

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

    def run(
        self, operation: Operation, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: Any
    ) -> tuple[Array, Any]:
        return operation.rows(self, inputs, parameters, state)

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"] | None,
        kv: Float[Array, "pages page_size kv2 head_dim"],
        *,
        scale: float,
        first_key: int = 0,
        window: int | None = None,
    ) -> tuple[Float[Array, "T heads head_dim"], Float[Array, "pages page_size kv2 head_dim"]]:
        kv = self.write_kv(k, v, kv)
        return self.read_kv(q, kv, scale=scale, first_key=first_key, window=window), kv

    def write_kv(
        self,
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"] | None,
        kv: Float[Array, "pages page_size kv2 head_dim"],
    ) -> Float[Array, "pages page_size kv2 head_dim"]:
        """Returns the pages with the tokens' keys and values."""
        page, offset = self.pages_of_tokens(kv.shape[1])
        return write_kv(kv, k, v, page=page, offset=offset)

    def record(
        self, values: Shaped[Array, "T 1 choices"], pages: Shaped[Array, "pages page_size 1 choices"]
    ) -> Shaped[Array, "pages page_size 1 choices"]:
        """Returns the pages with the values of the tokens."""
        page, offset = self.pages_of_tokens(pages.shape[1])
        return write_slots(pages, values, jnp.where(page > 0, page * pages.shape[1] + offset, 0))

    def pages_of_tokens(self, page_size: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Returns the page of each token, and its offset in the page."""
        count, steps = self.shape
        token_row = jnp.repeat(jnp.arange(count), steps)
        return page_of(self.page_table, token_row, self.positions, page_size=page_size)

    def read_kv(
        self,
        q: Float[Array, "T heads head_dim"],
        kv: Float[Array, "pages page_size kv2 head_dim"],
        *,
        scale: float,
        first_key: int,
        window: int | None,
    ) -> Float[Array, "T heads head_dim"]:
        """Attention of the tokens to the keys and values in their rows' pages."""
        out = paged_attention(
            self._rows(q),
            kv,
            positions=self._rows(self.positions),
            page_table=self.page_table,
            block_row=jnp.arange(self.shape[0]),
            scale=scale,
            first_key=first_key,
            window=window,
        )
        return out.reshape(q.shape)

    def by_row(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "rows steps ..."]:
        """Packed tokens by rows. Padding is zeros."""
        valid = self.valid.reshape(-1, *[1] * (x.ndim - 1))
        return self._rows(jnp.where(valid, x, 0))

    def by_token(self, rows: Shaped[Array, "rows steps ..."]) -> Shaped[Array, "T ..."]:
        """Converts rows back to packed tokens."""
        return rows.reshape(-1, *rows.shape[2:])

    def _rows(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "rows steps ..."]:
        return x.reshape(*self.shape, *x.shape[1:])


def page_of(
    page_table: Int[Array, "rows pages"],
    token_row: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    page_size: int,
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """Page and offset in it of each token; the null page for padding (position -1) and past the table's end."""
    index, offset = positions // page_size, positions % page_size
    inside = (positions >= 0) & (index < page_table.shape[1])
    return jnp.where(inside, page_table[token_row, jnp.where(inside, index, 0)], 0), offset
