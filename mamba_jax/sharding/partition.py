"""Selects the dimension of each parameter and each state that is divided over the devices, and places them there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mamba_jax.config import Division, HybridConfig, ModelConfigError, Placement, StateArray, StateUnit
from mamba_jax.sharding.axis import CONTEXT, TENSOR, members_of
from mamba_jax.sharding.parameters import placement, placements
from mamba_jax.store import Store, StoreShape, declarations, init_store
from mamba_jax.store_layout import placed


@dataclass(frozen=True)
class Partition:
    """How a model is divided over `shards` devices. `Partition.of` makes one."""

    config: HybridConfig
    shards: int
    members: int = 1
    """Members that pages are divided over by position; everything else is the same on all of them."""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(config: HybridConfig, shards: int, members: int = 1) -> Partition:
        """Returns the division of a model.

        Raises:
            ModelConfigError: something does not divide evenly.
        """
        partition = Partition(config, shards, members)
        for declared in placements(config).values():
            partition.placed(declared)
        _states(partition)
        return partition

    @classmethod
    def on(cls, config: HybridConfig, mesh: Any) -> Partition:
        """Returns the division of a model over a mesh; see `of`."""
        return cls.of(config, mesh.shape[TENSOR], members_of(mesh))

    def parameter(self, path: str) -> P:
        """Returns the division of the model's parameter with this dotted path.

        Raises:
            ModelConfigError: the model declares no such parameter.
        """
        found = placement(placements(self.config), path)
        if found is None:
            raise ModelConfigError(f"nothing declares how the parameter {path} is divided over devices")
        return self.placed(found)

    def placed(self, declared: Placement) -> P:
        """Returns the division of a parameter with this declaration."""
        return _spec(declared.over(self.shards) if isinstance(declared, Division) else None)

    def state(self, state: Any) -> Any:
        """Returns the division of a sublayer's piece of the store, in the same structure.

        Raises:
            ModelConfigError: no mixer of the model declares an array.
        """
        if state is None:
            return None
        if isinstance(state, tuple):
            return tuple(self.state(part) for part in state)
        declared = _states(self)
        if not isinstance(state, Mapping):
            return declared[StoreShape.of(self.config).pages[0].name]
        if unknown := state.keys() - declared.keys():
            raise ModelConfigError(f"no mixer declares the state {', '.join(sorted(unknown))}")
        # Under replay, each array is paired with its tails.
        return {
            name: (declared[name], self.state(part[1])) if isinstance(part, tuple) else declared[name]
            for name, part in state.items()
        }

    def store(self, store: Store) -> Store:
        """Returns the division of the whole store, in its structure."""
        shape = StoreShape.of(self.config)
        found = jax.tree.map(partial(_state_spec, self), declarations(shape, store))
        return replace(found, experts=P(CONTEXT)) if store.experts is not None and self.members > 1 else found

    def store_shape(self, shape: StoreShape) -> StoreShape:
        """Returns the shape of the whole model's state over all devices; some of it may be stored several times."""
        return shape.map(lambda array: array.over(self.shards))

    def device_shape(self, shape: StoreShape) -> StoreShape:
        """Returns the shape of one device's state."""
        return shape.map(lambda array: array.on_each(self.shards))


@lru_cache(maxsize=64)
def _states(partition: Partition) -> Mapping[str, P]:
    arrays = StoreShape.of(partition.config).arrays_and_tails
    specs = {name: _state_spec(partition, array) for name, array in arrays.items()}
    return MappingProxyType(specs)


def _state_spec(partition: Partition, array: StateArray) -> P:
    spec = _spec(array.over(partition.shards).division, leading=1 if array.per is StateUnit.SLOT else 2)
    divides_pages = array.per is StateUnit.TOKEN and partition.members > 1
    return P(CONTEXT, *tuple(spec)[1:]) if divides_pages else spec


def _spec(division: Division | None, *, leading: int = 0) -> P:
    return P() if division is None else P(*[None] * (leading + division.axis), TENSOR)


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


def shard_parameters(values: Mapping[str, Array], config: HybridConfig, mesh: Mesh) -> dict[str, Array]:
    """Returns parameters by dotted path, moved to their devices of the mesh. Those already there stay."""
    sharding = parameter_shardings(config, mesh)
    return {path: jax.device_put(value, sharding(path)) for path, value in values.items()}
