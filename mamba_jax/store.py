"""The state store: every sequence's recurrent state in slots, every token's keys and values in pages.

One slot holds a complete resumption point S(n) of one sequence: for each Mamba layer the SSM state and the last
`conv_width - 1` convolution inputs, and the final hidden state of token n. One page holds `page_size` tokens of every
attention layer. Index 0 of both is null: padding points to it, readers mask it to zeros and writers drop it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.slots import load, put, read_slots, take, write_slots

if TYPE_CHECKING:
    from mamba_jax.config import HybridConfig

__all__ = [
    "MambaSlots", "Store", "StoreShape", "init_store", "load", "put", "read_slots", "store_bytes", "take",
    "write_slots",
]  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MambaSlots:
    """One Mamba layer's part of every slot. The convolution windows hold raw inputs, oldest first."""

    ssm: Float[Array, "slots heads head_dim state"]
    conv_x: Float[Array, "slots window inner"]
    conv_bc: Float[Array, "slots window bc"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Store:
    """All slots and pages of a model; donated to every step and updated in place."""

    mamba: tuple[MambaSlots, ...]
    """One for each Mamba layer, in model order."""
    kv: tuple[Float[Array, "pages page_size kv2 head_dim"], ...]
    """One for each use of attention, in model order, then the draft layers'; K at even, V at odd index of axis 2."""
    hidden: Float[Array, "slots hidden"]
    """The hidden state, after the final norm, of the last token each slot has absorbed."""
    tags: Int[Array, "slots 2"] | None
    """Debugging only: how often each slot has been written, and how many tokens it holds."""

    @property
    def num_slots(self) -> int:
        """How many slots there are, the null slot included."""
        return self.hidden.shape[0]

    @property
    def num_pages(self) -> int:
        """How many pages there are, the null page included; 0 for a model without attention."""
        return self.kv[0].shape[0] if self.kv else 0

    @property
    def page_size(self) -> int:
        """Tokens in a page; 0 for a model without attention."""
        return self.kv[0].shape[1] if self.kv else 0


@dataclass(frozen=True)
class StoreShape:
    """What one slot and one page of a model consist of, for making a store and for counting its bytes."""

    mamba_layers: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_window: int
    """Convolution inputs that a slot keeps: the kernel's width - 1."""
    attention_layers: int
    kv_heads: int
    kv_head_dim: int
    hidden_size: int
    lanes: int = 1
    """A device pads states, keys and values to a multiple of this: see `store_layout`. Only counting looks at it."""

    @classmethod
    def of(cls, config: HybridConfig) -> StoreShape:
        """The shape of a model's state, its draft layers included."""
        mamba, attention = config.mamba, config.attention
        return cls(
            mamba_layers=config.num_mamba_layers if mamba else 0,
            heads=mamba.num_heads if mamba else 0,
            head_dim=mamba.head_dim if mamba else 0,
            state_size=mamba.state_size if mamba else 0,
            groups=mamba.num_groups if mamba else 0,
            conv_window=mamba.conv_width - 1 if mamba else 0,
            attention_layers=config.num_attention_layers if attention else 0,
            kv_heads=attention.num_kv_heads if attention else 0,
            kv_head_dim=attention.head_dim if attention else 0,
            hidden_size=config.hidden_size,
        )

    def bytes_per_slot(self, dtype: Any, ssm_dtype: Any = jnp.float32, *, debug_state: bool = False) -> int:
        """Bytes of one slot over all layers. `dtype` is that of convolution windows and hidden state."""
        ssm = self.heads * self.head_dim * self._padded(self.state_size) * jnp.dtype(ssm_dtype).itemsize
        conv = self.conv_window * (self.heads * self.head_dim + 2 * self.groups * self.state_size)
        other = self.mamba_layers * conv + self.hidden_size
        return self.mamba_layers * ssm + other * jnp.dtype(dtype).itemsize + (8 if debug_state else 0)

    def bytes_per_page(self, page_size: int, dtype: Any) -> int:
        """Bytes of one page over all attention layers; 0 for a model without attention."""
        per_token = self.attention_layers * 2 * self.kv_heads * self._padded(self.kv_head_dim)
        return per_token * page_size * jnp.dtype(dtype).itemsize

    def _padded(self, size: int) -> int:
        return -(-size // self.lanes) * self.lanes


def init_store(
    config: HybridConfig | StoreShape,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    dtype: Any,
    ssm_dtype: Any = jnp.float32,
    debug_state: bool = False,
) -> Store:
    """A store of zeros.

    Args:
        config: the model's config, or the shape of its state.
        num_slots: slots, the null slot included (at least 2).
        num_pages: pages, the null page included; ignored by a model without attention.
        page_size: tokens in a page.
        dtype: of keys, values, convolution windows and hidden states.
        ssm_dtype: of the SSM states; anything below float32 trades accuracy for memory.
        debug_state: also tag each slot with what was written to it, and check the tag at each read.

    Raises:
        ValueError: fewer than two slots or pages, or an empty page.
    """
    shape = config if isinstance(config, StoreShape) else StoreShape.of(config)
    if num_slots < 2:
        raise ValueError(f"num_slots is {num_slots}: at least 2 are needed, the null slot and one more")
    if shape.attention_layers and (num_pages < 2 or page_size < 1):
        raise ValueError(f"{num_pages} pages of {page_size} tokens: at least the null page and one more are needed")
    inner, bc = shape.heads * shape.head_dim, 2 * shape.groups * shape.state_size

    # Every array is its own allocation: donation cannot alias two outputs to one buffer.
    def mamba_slots() -> MambaSlots:
        return MambaSlots(
            ssm=jnp.zeros((num_slots, shape.heads, shape.head_dim, shape.state_size), ssm_dtype),
            conv_x=jnp.zeros((num_slots, shape.conv_window, inner), dtype),
            conv_bc=jnp.zeros((num_slots, shape.conv_window, bc), dtype),
        )

    pages = (num_pages, page_size, 2 * shape.kv_heads, shape.kv_head_dim)
    return Store(
        mamba=tuple(mamba_slots() for _ in range(shape.mamba_layers)),
        kv=tuple(jnp.zeros(pages, dtype) for _ in range(shape.attention_layers)),
        hidden=jnp.zeros((num_slots, shape.hidden_size), dtype),
        tags=jnp.zeros((num_slots, 2), jnp.int32) if debug_state else None,
    )


def store_bytes(store: Store) -> int:
    """Bytes of all arrays of a store (which may be abstract)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(store))
