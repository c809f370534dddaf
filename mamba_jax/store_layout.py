"""Layouts of the store's arrays in a device's memory, where the compiler's choice is not suitable.

The TPU's compiler orders an array's axes to minimize padding. Registers have 128 lanes: if the last axis of recurrent
states (or of heads, in the cache of keys and values) is shorter, the compiler puts the slots innermost. Then no
operation can change one slot in place, and each copies the whole store. Such arrays (declared as `StateArray.padded`,
including tails of step sizes) are pinned to row-major order and padded, so `StoreShape` counts the padding. Windows are
pinned too, because the compiler would put their few rows outermost: pinned, a slot's window is copied as one piece. All
other arrays are row-major in the relevant axes anyway.
"""

from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from mamba_jax.config import HybridConfig, StateArray
from mamba_jax.store import Store, StoreShape, declarations, init_store

_LANES = {"tpu": 128}


def lanes_of(platform: str) -> int:
    """Returns the number of lanes to whose multiples the last axis of recurrent states, keys and values is padded."""
    return _LANES.get(platform, 1)


def placed(shape: StoreShape, store: Store, shardings: Store) -> Store:
    """Returns the placement of every array: its given sharding (None: any), with a layout if the array is pinned."""

    def of(array: StateArray, leaf: Any, sharding: Any) -> Any:
        if sharding is None:
            return None
        device: Any = next(iter(sharding.device_set))
        lanes, here = lanes_of(device.platform), sharding.shard_shape(leaf.shape)
        short = array.padded and here[-1] % lanes
        pinned = short or replace(array, shape=tuple(here[1:])).copied_by_slots(lanes)
        return Format(Layout(tuple(range(leaf.ndim))), sharding) if pinned else sharding

    return jax.tree.map(of, declarations(shape, store), store, shardings)


def places(shape: StoreShape, store: Store) -> Store:
    """Returns `placed` with every array's current sharding: the `out_shardings` of a program that returns the store.

    The value is None for abstract arrays without a sharding.
    """
    return placed(shape, store, jax.tree.map(lambda leaf: leaf.sharding, store))


def is_pinned(shape: StoreShape, store: Store) -> bool:
    """Returns whether a program that returns the store must specify layouts."""
    return any(isinstance(each, Format) for each in jax.tree.leaves(places(shape, store)))


def init_laid_out(config: HybridConfig | StoreShape, **sizes: Any) -> Store:
    """Makes a store as `init_store` does, with every array in its layout."""
    shape = config if isinstance(config, StoreShape) else StoreShape.of(config)
    store = init_store(config, **sizes)
    return jax.tree.map(jax.device_put, store, places(shape, store)) if is_pinned(shape, store) else store
