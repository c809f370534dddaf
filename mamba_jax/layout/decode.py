"""The tokens of a decode step: rows of equal width, one recurrent step after the other."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.places import Rows
from mamba_jax.layout.operation import Inputs, Operation, Parameters
from mamba_jax.layout.paged import PagedTokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeLayout(PagedTokens):
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

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        return operation.rows(self, inputs, parameters, state)

    @property
    def token_row(self) -> Int[Array, " T"]:
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
