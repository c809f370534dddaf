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
        width = -(-page_table.shape[1] // self.count)
        table = jnp.pad(page_table, ((0, 0), (0, width * self.count - page_table.shape[1])))
        table = table.reshape(-1, width, self.count)[:, :, self.index]
        own = self.own_pages(table, kv.shape[0])
        return paged_attention_part(q, kv, page_table=own, first_page=self.index, page_stride=self.count, **places)
