"""A mixer run by all devices at once, each with its own pieces of the weights and of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from mamba_jax.config import HybridConfig
from mamba_jax.layout.sequence import SequenceLayout
from mamba_jax.sharding.axis import AXIS, axis_index, axis_mesh
from mamba_jax.sharding.partition import Partition

Run = Callable[..., tuple[Array, Any]]


def across(
    config: HybridConfig, modules: Mapping[str, nnx.Module | None], run: Run, layout: Any, state: Any, *inputs: Any
) -> tuple[Array, Any]:
    """`run(modules, layout, state, *inputs) -> (y, state)`, divided over the mesh's devices if there is a mesh.

    On each device, modules then hold pieces of their weights and `state` is a piece of the store; everything else is
    whole. What `run` gives as y is a partial sum, and the sum over all devices comes back.

    Whole sequences (without a store) are left to the compiler, which can also differentiate them.
    """
    mesh = axis_mesh()
    if mesh is None or isinstance(layout, SequenceLayout):
        return run(modules, layout, state, *inputs)
    partition = Partition.of(config, mesh.shape[AXIS])
    graphs, weights, specs = {}, {}, {}
    for name, module in modules.items():
        if module is None:
            continue
        graphs[name], found = nnx.split(module)
        flat = {".".join((name, *map(str, path))): (path, leaf) for path, leaf in nnx.to_flat_state(found)}
        weights[name] = {path: leaf[...] for path, (_, leaf) in flat.items()}
        specs[name] = {path: partition.parameter(path) for path in flat}

    def rebuilt(name: str, pieces: Mapping[str, Array]) -> nnx.Module:
        _, found = nnx.split(modules[name])
        leaves = []
        for path, leaf in nnx.to_flat_state(found):
            dotted = ".".join((name, *map(str, path)))
            value = pieces[dotted]
            if partition.added_once(dotted):
                value = jnp.where(axis_index() == 0, value, jnp.zeros((), value.dtype))
            leaves.append((path, leaf.replace(value)))
        return nnx.merge(graphs[name], nnx.from_flat_state(leaves))

    def on_each_device(weights: Any, layout: Any, state: Any, *inputs: Any) -> tuple[Array, Any]:
        here = {name: rebuilt(name, weights[name]) if name in weights else None for name in modules}
        y, state = run(here, layout, state, *inputs)
        return lax.psum(y, AXIS), state

    of_state = partition.state(state)
    whole = [P()] * len(inputs)
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(specs, P(), of_state, *whole),
        out_specs=(P(), of_state),
        check_vma=False,
    )(weights, layout, state, *inputs)


def own_columns(x: Float[Array, "T inputs"], width: int) -> Float[Array, "T width"]:
    """This device's piece of a whole input, for a weight that is divided by its inputs."""
    if x.shape[1] == width:
        return x
    return lax.dynamic_slice_in_dim(x, axis_index() * width, width, axis=1)
