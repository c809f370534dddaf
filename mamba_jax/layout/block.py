"""The tokens of a block that is drafted in one pass: each row's tokens see each other in both directions."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.paged_attention import paged_attention
from mamba_jax.layout.decode import DecodeLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockLayout(DecodeLayout):
    """A `DecodeLayout` in which each token attends to all tokens of its row, later ones included."""

    def read_kv(
        self,
        q: Float[Array, "T heads head_dim"],
        kv: Float[Array, "pages page_size kv2 head_dim"],
        *,
        scale: float,
        first_key: int,
        window: int | None,
    ) -> Float[Array, "T heads head_dim"]:
        """Attention of the tokens to the keys and values in their rows' pages, up to the block's last token.

        Raises:
            ValueError: with a window, which each token has at another place.
        """
        if window is not None:
            raise ValueError(f"attention of a block to a window of {window} tokens is not supported")
        rows, steps = self.shape
        groups, head_dim = kv.shape[2] // 2, q.shape[2]
        # The tokens of a row see the same keys: to the operation they are further heads of one query, which groups of
        # heads share keys as before. It then reads each key once.
        by_group = q.reshape(rows, steps, groups, -1, head_dim).swapaxes(1, 2)
        out = paged_attention(
            by_group.reshape(rows, 1, -1, head_dim),
            kv,
            positions=self.positions.reshape(rows, steps).max(axis=1, keepdims=True),
            page_table=self.page_table,
            block_row=jnp.arange(rows),
            scale=scale,
            first_key=first_key,
        )
        return out.reshape(by_group.shape).swapaxes(1, 2).reshape(q.shape)
