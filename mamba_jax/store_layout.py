"""How the store's arrays lie in a device's memory, where that cannot be left to the compiler.

The TPU's compiler orders an array's axes so that little of it is padding. The registers there have 128 lanes: where
recurrent states have fewer numbers in their last axis (or heads, in the cache of keys and values), it puts the slots
innermost, and no operation can then change one slot in place; each copies the whole store. Such arrays (those declared
as `StateArray.padded`, tails of step sizes among them) are pinned to row-major order and take the padding instead, so
`StoreShape` counts it. So are windows, whose few rows it would rather have outermost: a slot's are then copied as one
piece. All else is row-major in the axes that matter anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from mamba_jax.config import HybridConfig, StateArray
from mamba_jax.store import Store, StoreShape, init_store
from mamba_jax.tails import Tails

_LANES = {"tpu": 128}


def lanes_of(platform: str) -> int:
    """Numbers to whose multiple the last axis of recurrent states, keys and values is padded."""
    return _LANES.get(platform, 1)


def place(array: StateArray, leaf: Any, sharding: Sharding) -> Format | Sharding:
    """Where an array of the store belongs: the sharding, with an order of the axes where that matters."""
    device: Any = next(iter(sharding.device_set))
    lanes, here = lanes_of(device.platform), sharding.shard_shape(leaf.shape)
    short = array.padded and here[-1] % lanes
    if short or replace(array, shape=tuple(here[1:])).copied_by_slots(lanes):
        return Format(Layout(tuple(range(leaf.ndim))), sharding)
    return sharding


def placed(shape: StoreShape, store: Store, shardings: Store) -> Store:
    """`place` of every array, given its sharding (or None, where it may lie anywhere)."""

    def of(array: StateArray, leaf: Any, sharding: Any) -> Any:
        return sharding and place(array, leaf, sharding)

    return replace(
        store,
        slots=tuple(
            {name: of(shape.arrays[name], leaf, where[name]) for name, leaf in arrays.items()}
            for arrays, where in zip(store.slots, shardings.slots, strict=True)
        ),
        kv=tuple(of(shape.pages[0], leaf, where) for leaf, where in zip(store.kv, shardings.kv, strict=True)),
        hidden=of(shape.hidden, store.hidden, shardings.hidden),
        tags=shardings.tags,
        tails=_placed_tails(of, shape, store, shardings),
    )


def _placed_tails(
    of: Callable[[StateArray, Any, Any], Any], shape: StoreShape, store: Store, shardings: Store
) -> Tails | None:
    if store.tails is None or shardings.tails is None:
        return None
    pairs = zip(store.tails.layers, shardings.tails.layers, strict=True)
    layers = tuple(
        {name: of(shape.arrays_and_tails[name], leaf, where[name]) for name, leaf in arrays.items()}
        for arrays, where in pairs
    )
    return replace(shardings.tails, layers=layers)


def places(shape: StoreShape, store: Store) -> Store:
    """`place` of every array where it lies: the `out_shardings` of a program that returns the store.

    Abstract arrays may lie nowhere yet; for them it is None.
    """
    return placed(shape, store, jax.tree.map(lambda leaf: leaf.sharding, store))


def is_pinned(shape: StoreShape, store: Store) -> bool:
    """Whether a program that returns the store must say how it lies."""
    return any(isinstance(each, Format) for each in jax.tree.leaves(places(shape, store)))


def init_laid_out(config: HybridConfig | StoreShape, **sizes: Any) -> Store:
    """As `init_store`, with every array where it belongs."""
    shape = config if isinstance(config, StoreShape) else StoreShape.of(config)
    store = init_store(shape, **sizes)
    return jax.tree.map(jax.device_put, store, places(shape, store)) if is_pinned(shape, store) else store
