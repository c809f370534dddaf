"""The part of a device of a mesh whose members divide all pages by position: page i of a row is on member i mod n.

Each member has a sub-pool of as many pages: those of member m are numbered from m times this number on, and the first
of them is its null page. So a page's number tells its member.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas.paged_attention import merge_attention_parts, paged_attention_part
from kernels_pallas.slots import read_slots


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Member:
    """This device's member of a mesh, inside of `jax.shard_map` only."""

    index: Int[Array, ""]
    count: int = field(metadata={"static": True})
    axis: str = field(metadata={"static": True})
    """The axis of the mesh along which the members lie."""

    def own_pages(self, pages: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Returns the indices of pages in this member's sub-pool of `size` pages; 0 for those of other members."""
        own = pages - self.index * size
        return jnp.where((own > 0) & (own < size), own, 0)

    def own_columns(self, table: Int[Array, "rows pages"], first: Int[Array, ""] | int = 0) -> Int[Array, "rows own"]:
        """Returns every N-th column, those of this member, if column 0 is the `first` member's; 0 behind the last."""
        width = -(-table.shape[1] // self.count)
        padded = jnp.pad(table, ((0, 0), (0, width * self.count - table.shape[1])))
        return padded.reshape(-1, width, self.count)[:, :, (self.index - first) % self.count]

    def read_pages(self, pool: Shaped[Array, "pages ..."], pages: Int[Array, "..."]) -> Shaped[Array, "..."]:
        """Returns pages of all members, which follow each other in a row; zeros for page 0. `pool`: the own sub-pool.

        Each member sends its own ones, as they are.
        """
        first = pages[0] // len(pool)
        own = self.own_pages(self.own_columns(pages[None], first)[0], len(pool))
        parts = lax.all_gather(read_slots(pool, own, divided=True), self.axis, axis=1)
        return jnp.roll(parts, -first, axis=1).reshape(-1, *pool.shape[1:])[: len(pages)]

    def own(self, x: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """Returns this member's part of the entries along an axis, which divide evenly."""
        size = x.shape[axis] // self.count
        return lax.dynamic_slice_in_dim(x, self.index * size, size, axis)

    def gather(self, x: Shaped[Array, "..."], axis: int = 0) -> Shaped[Array, "..."]:
        """Returns the parts of all members, one after the other along an axis."""
        gathered: Array = lax.all_gather(x, self.axis, axis=axis, tiled=True)
        return gathered

    def exchange(self, x: Shaped[Array, "..."], *, split: int, concat: int) -> Shaped[Array, "..."]:
        """Each member's array is cut along axis `split` into a part for each member. Returns those for this member, one
        of each array, joined along axis `concat` in the order of members."""
        exchanged: Array = lax.all_to_all(x, self.axis, split, concat, tiled=True)
        return exchanged

    def attention(
        self, q: Float[Array, "blocks q_len q_heads head_dim"], kv: Float[Array, "pages ..."], **places: Any
    ) -> Float[Array, "blocks q_len q_heads head_dim"]:
        """As `paged_attention` with these arguments, over the pages of all members; `kv` is this member's sub-pool.

        Every member attends to its own keys, and all merge the parts in the order of members.
        """
        out, lse = (lax.all_gather(each, self.axis) for each in self.part(q, kv, **places))
        return merge_attention_parts(out, lse).astype(q.dtype)

    def part(
        self,
        q: Float[Array, "blocks q_len q_heads head_dim"],
        kv: Float[Array, "pages page_size kv_entries head_dim"],
        *,
        page_table: Int[Array, "rows pages_per_row"],
        **places: Any,
    ) -> tuple[Float[Array, "blocks q_len q_heads head_dim"], Float[Array, "blocks q_len q_heads"]]:
        """Returns this member's part of `attention`; see `paged_attention_part`."""
        own = self.own_pages(self.own_columns(page_table), kv.shape[0])
        return paged_attention_part(q, kv, page_table=own, first_page=self.index, page_stride=self.count, **places)
