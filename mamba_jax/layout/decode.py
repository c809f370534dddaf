"""The tokens of a decode step: rows of equal width, one recurrent step after the other."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.causal_conv1d import causal_conv1d_update
from kernels_pallas.paged_attention import paged_attention, write_kv
from kernels_pallas.state_update import state_update


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeLayout:
    """D rows x S steps, T = D * S: a row's tokens come first, padding after them."""

    positions: Int[Array, " T"]
    """Absolute; -1 = padding."""
    valid: Bool[Array, " T"]
    read_slot: Int[Array, " rows"]
    """0 for rows that have nothing to read."""
    write_slot: Int[Array, "rows steps"]
    """0 for padding."""
    page_table: Int[Array, "rows pages"]

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
        """The layout of rows that have absorbed `length` tokens and are fed `num_tokens` more."""
        step = jnp.arange(write_slot.shape[1])
        valid = step < num_tokens[:, None]
        return cls(
            positions=jnp.where(valid, length[:, None] + step, -1).reshape(-1),
            valid=valid.reshape(-1),
            # A row without tokens (padding, or one that only samples) must not move any state about.
            read_slot=jnp.where((length > 0) & (num_tokens > 0), read_slot, 0),
            write_slot=jnp.where(valid, write_slot, 0),
            page_table=page_table,
        )

    def conv(
        self,
        x: Float[Array, "T channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        state: Float[Array, "slots window channels"],
    ) -> tuple[Float[Array, "T channels"], Float[Array, "slots window channels"]]:
        y, state = causal_conv1d_update(
            self._by_row(x), weight, bias, state, read_slot=self.read_slot, write_slot=self.write_slot
        )
        return y.reshape(x.shape), state

    def scan(
        self,
        x: Float[Array, "T heads head_dim"],
        dt: Float[Array, "T heads"],
        a: Float[Array, " heads"],
        b: Float[Array, "T groups state"],
        c: Float[Array, "T groups state"],
        d: Float[Array, " heads"],
        state: Float[Array, "slots heads head_dim state"],
    ) -> tuple[Float[Array, "T heads head_dim"], Float[Array, "slots heads head_dim state"]]:
        # With dt = 0 and x = 0 a padding token is exactly a no-op, whatever its embedding led to.
        y, state = state_update(
            self._by_row(jnp.where(self.valid[:, None, None], x, 0)),
            self._by_row(jnp.where(self.valid[:, None], dt, 0)),
            a,
            self._by_row(b),
            self._by_row(c),
            d,
            state,
            read_slot=self.read_slot,
            write_slot=self.write_slot,
        )
        return y.reshape(x.shape), state

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"],
        kv: Float[Array, "pages page_size kv2 head_dim"],
        *,
        scale: float,
        first_key: int = 0,
    ) -> tuple[Float[Array, "T heads head_dim"], Float[Array, "pages page_size kv2 head_dim"]]:
        rows = jnp.arange(self.write_slot.shape[0])
        page, offset = page_of(
            self.page_table, jnp.repeat(rows, self.write_slot.shape[1]), self.positions, page_size=kv.shape[1]
        )
        kv = write_kv(kv, k, v, page=page, offset=offset)
        out = paged_attention(
            self._by_row(q),
            kv,
            positions=self._by_row(self.positions),
            page_table=self.page_table,
            block_row=rows,
            scale=scale,
            first_key=first_key,
        )
        return out.reshape(q.shape), kv

    def _by_row(self, x: Array) -> Array:
        return x.reshape(*self.write_slot.shape, *x.shape[1:])


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
