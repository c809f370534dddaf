"""Places parameters, store and rows on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from mamba_jax.config import HybridConfig
from mamba_jax.sharding.axis import TENSOR, replicated
from mamba_jax.sharding.partition import Partition
from mamba_jax.store import Store, StoreShape, init_store
from mamba_jax.store_layout import placed

if TYPE_CHECKING:
    from mamba_jax.rows import Rows


def parameter_shardings(config: HybridConfig, mesh: Mesh) -> Callable[[str], NamedSharding]:
    """Returns the sharding of each parameter by its dotted path, as `checkpoints.load_model` takes it.

    Raises:
        ModelConfigError: the model does not divide over the mesh.
    """
    partition = Partition.of(config, mesh.shape[TENSOR])
    return lambda path: NamedSharding(mesh, partition.parameter(path))


def store_shardings(store: Store, config: HybridConfig, mesh: Mesh) -> Store:
    """Where each of the store's arrays belongs, in its structure: a sharding, or a `Format` (see `store_layout`)."""
    specs = Partition.on(config, mesh).store(store)
    return placed(StoreShape.of(config), store, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def sharded_store(config: HybridConfig, mesh: Mesh, **sizes: Any) -> Store:
    """As `init_store`, each device making its own piece only."""
    routed_experts = sizes.get("routed_experts", False)
    shape = Partition.of(config, mesh.shape[TENSOR]).store_shape(StoreShape.of(config, routed_experts=routed_experts))

    def make() -> Store:
        return init_store(shape, **sizes)

    return jax.jit(make, out_shardings=store_shardings(jax.eval_shape(make), config, mesh))()


def rows_shardings(rows: Rows, mesh: Mesh) -> Rows:
    """Where each array of the seats belongs, in their structure: tables of the vocabulary are divided as logits are."""
    whole = replicated(mesh)
    divides = rows.output_counts.shape[1] % mesh.shape[TENSOR] == 0
    tables = NamedSharding(mesh, PartitionSpec(None, TENSOR)) if divides else whole
    return replace(jax.tree.map(lambda _: whole, rows), output_counts=tables, prompt_seen=tables)


def shard_parameters(values: Mapping[str, Array], config: HybridConfig, mesh: Mesh) -> dict[str, Array]:
    """Returns parameters by dotted path, moved to their devices of the mesh. Those already there stay."""
    sharding = parameter_shardings(config, mesh)
    return {path: jax.device_put(value, sharding(path)) for path, value in values.items()}
