"""How the store's arrays lie in a device's memory, where that cannot be left to the compiler.

The TPU's compiler orders an array's axes so that little of it is padding. The registers there have 128 lanes: where
states have fewer numbers (or heads, in the cache of keys and values), it puts the slots innermost, and no operation can
then change one slot in place; each copies the whole store. Such arrays are pinned to row-major order and take the
padding instead, so `StoreShape` counts it. All else is row-major in the axes that matter anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from mamba_jax.store import Store, StoreShape, init_store

if TYPE_CHECKING:
    from mamba_jax.config import HybridConfig

_LANES = {"tpu": 128}


def lanes_of(platform: str) -> int:
    """Numbers to whose multiple the last axis of states, keys and values is padded."""
    return _LANES.get(platform, 1)


def place(leaf: Any, sharding: Sharding) -> Format | Sharding:
    """Where an array of the store belongs: the sharding, with an order of the axes where that matters."""
    device: Any = next(iter(sharding.device_set))
    if leaf.ndim == 4 and leaf.shape[-1] % lanes_of(device.platform):
        return Format(Layout(tuple(range(leaf.ndim))), sharding)
    return sharding


def places(store: Store) -> Store:
    """`place` of every array: the `out_shardings` of a program that returns the store.

    Abstract arrays may lie nowhere yet; for them it is None.
    """
    return jax.tree.map(lambda leaf: leaf.sharding and place(leaf, leaf.sharding), store)


def is_pinned(store: Store) -> bool:
    """Whether a program that returns the store must say how it lies."""
    return any(isinstance(each, Format) for each in jax.tree.leaves(places(store)))


def init_laid_out(config: HybridConfig | StoreShape, **sizes: Any) -> Store:
    """As `init_store`, with every array where it belongs."""
    store = init_store(config, **sizes)
    return jax.tree.map(jax.device_put, store, places(store)) if is_pinned(store) else store
