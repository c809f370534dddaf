"""Attention of tokens whose keys and values are in pages: what the layouts of decode and prefill share."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.paged_attention import paged_attention, write_kv
from kernels_pallas.slots import write_slots
from mamba_jax.layout.base import Keys, Pages, Queries, Span
from mamba_jax.layout.member import Member


@dataclass(frozen=True)
class PagedTokens:
    """Tokens of rows with page tables. Subclasses say how queries are arranged in blocks that see the same keys."""

    positions: Int[Array, " T"]
    """Absolute; -1 = padding."""
    valid: Bool[Array, " T"]
    read_slot: Int[Array, " rows"]
    """The slot of the state before the step; 0 = zeros, and for rows without tokens."""
    page_table: Int[Array, "rows pages"]
    adapter: Int[Array, " T"] | None = field(default=None, kw_only=True)
    """Entry of each token's adapter, 0 = none; None for a model without adapters."""
    member: Member | None = field(default=None, kw_only=True)
    """None: this device has all pages."""

    def on_member(self, member: Member) -> Self:
        """Returns the layout on a device that has one member's pages."""
        return replace(self, member=member)

    def row_of_each(self) -> Int[Array, " T"]:
        """Returns the row of each token."""
        raise NotImplementedError

    def by_block(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "blocks q_len ..."]:
        """Tokens by blocks of queries of one row."""
        raise NotImplementedError

    def by_token(self, blocks: Shaped[Array, "blocks q_len ..."]) -> Shaped[Array, "T ..."]:
        """Converts blocks back to packed tokens."""
        raise NotImplementedError

    def query_blocks(self) -> tuple[Int[Array, "blocks q_len"], Int[Array, " blocks"]]:
        """Returns the positions of the queries, -1 for padding, and the row of each block."""
        raise NotImplementedError

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: Pages, span: Span) -> tuple[Queries, Pages]:
        kv = self.write_kv(k, v, kv)
        return self.read_kv(q, kv, span), kv

    def write_kv(self, k: Keys, v: Keys | None, kv: Pages) -> Pages:
        """Returns the pages with the tokens' keys and values."""
        page, offset = self.pages_of_tokens(kv)
        return write_kv(kv, k, v, page=page, offset=offset)

    def record(
        self, values: Shaped[Array, "T 1 choices"], pages: Shaped[Array, "pages page_size 1 choices"]
    ) -> Shaped[Array, "pages page_size 1 choices"]:
        """Returns the pages with the values of the tokens."""
        page, offset = self.pages_of_tokens(pages)
        return write_slots(pages, values, jnp.where(page > 0, page * pages.shape[1] + offset, 0))

    def pages_of_tokens(self, pages: Shaped[Array, "pages page_size ..."]) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """Returns the place of each token's page in an array of pages (0 if another member has it), and its offset."""
        page, offset = page_of(self.page_table, self.row_of_each(), self.positions, page_size=pages.shape[1])
        return page if self.member is None else self.member.own_pages(page, len(pages)), offset

    def read_kv(self, q: Queries, kv: Pages, span: Span) -> Queries:
        """Attention of the tokens to the keys and values in their rows' pages."""
        return self.by_token(self.attention(self.by_block(q), kv, *self.query_blocks(), span))

    def attention(
        self,
        q: Float[Array, "blocks q_len q_heads head_dim"],
        kv: Pages,
        positions: Int[Array, "blocks q_len"],
        block_row: Int[Array, " blocks"],
        span: Span,
    ) -> Float[Array, "blocks q_len q_heads head_dim"]:
        """Attention of blocks of queries at positions of their rows; see `paged_attention`."""
        attend = paged_attention if self.member is None else self.member.attention
        return attend(q, kv, **self.places(positions, block_row, span))

    def places(
        self, positions: Int[Array, "blocks q_len"], block_row: Int[Array, " blocks"], span: Span
    ) -> dict[str, Any]:
        """Returns the arguments of `attention` as `paged_attention` takes them."""
        seen = {"scale": span.scale, "first_key": span.first_key, "window": span.window}
        return {"positions": positions, "block_row": block_row, "page_table": self.page_table, **seen}


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
