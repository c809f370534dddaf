"""Attention of tokens whose keys and values are in pages: what the layouts of decode and prefill share."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas.paged_attention import paged_attention, write_kv
from kernels_pallas.slots import write_slots


class PagedTokens:
    """Tokens of rows with page tables. Subclasses say how queries are arranged in blocks that see the same keys."""

    positions: Int[Array, " T"]
    page_table: Int[Array, "rows pages"]
    token_row: Any
    """The row of each token, [T]."""

    def by_block(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "blocks q_len ..."]:
        """Tokens by blocks of queries of one row."""
        raise NotImplementedError

    def by_token(self, blocks: Shaped[Array, "blocks q_len ..."]) -> Shaped[Array, "T ..."]:
        """Converts blocks back to packed tokens."""
        raise NotImplementedError

    def query_blocks(self) -> tuple[Int[Array, "blocks q_len"], Int[Array, " blocks"]]:
        """Returns the positions of the queries, -1 for padding, and the row of each block."""
        raise NotImplementedError

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
        return page_of(self.page_table, self.token_row, self.positions, page_size=page_size)

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
        positions, block_row = self.query_blocks()
        out = paged_attention(
            self.by_block(q),
            kv,
            positions=positions,
            page_table=self.page_table,
            block_row=block_row,
            scale=scale,
            first_key=first_key,
            window=window,
        )
        return self.by_token(out)


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
