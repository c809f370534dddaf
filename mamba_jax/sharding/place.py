"""Putting parameters, store and rows where a mesh wants them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from mamba_jax.config import HybridConfig
from mamba_jax.sharding.axis import TENSOR, replicated
from mamba_jax.sharding.partition import Partition
from mamba_jax.store import Store, StoreShape, init_store
from mamba_jax.store_layout import placed


def parameter_shardings(config: HybridConfig, mesh: Mesh) -> Callable[[str], NamedSharding]:
    """The sharding of each parameter by its dotted path, as `checkpoints.load_model` takes it.

    Raises:
        ModelConfigError: the model does not divide over the mesh.
    """
    partition = Partition.of(config, mesh.shape[TENSOR])
    return lambda path: NamedSharding(mesh, partition.parameter(path))


def store_shardings(store: Store, config: HybridConfig, mesh: Mesh) -> Store:
    """Where each of the store's arrays belongs, in its structure: a sharding, or a `Format` (see `store_layout`)."""
    specs = Partition.of(config, mesh.shape[TENSOR]).store(store)
    return placed(StoreShape.of(config), store, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def sharded_store(config: HybridConfig, mesh: Mesh, **sizes: Any) -> Store:
    """As `init_store`, each device making its own piece only."""
    shape = Partition.of(config, mesh.shape[TENSOR]).store_shape(StoreShape.of(config))

    def make() -> Store:
        return init_store(shape, **sizes)

    return jax.jit(make, out_shardings=store_shardings(jax.eval_shape(make), config, mesh))()


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Whole arrays on every device."""
    return jax.device_put(tree, replicated(mesh))


def shard_parameters(values: Mapping[str, Array], config: HybridConfig, mesh: Mesh) -> dict[str, Array]:
    """Parameters by dotted path, moved to where the mesh wants them; those that lie there already stay."""
    sharding = parameter_shardings(config, mesh)
    return {path: jax.device_put(value, sharding(path)) for path, value in values.items()}
