"""Runs a mixer on all devices at once, each with its own pieces of the weights and of the state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from mamba_jax.config import ADDED_ONCE, HybridConfig, ModelConfigError, Placement
from mamba_jax.layout.member import Member
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.layout.sequence import SequenceLayout
from mamba_jax.layout.shares import ShareLayout
from mamba_jax.sharding.axis import (
    CONTEXT,
    TENSOR,
    axis_index,
    axis_mesh,
    members_of,
    shares_of,
    sum_over_devices,
)
from mamba_jax.sharding.parameters import of_whole_input, placement
from mamba_jax.sharding.partition import Partition
from mamba_jax.store import EXPERTS

Run = Callable[..., tuple[Array, Any]]


@dataclass(frozen=True)
class ShardedModule:
    """A module, and how each of its parameters is divided, by its dotted path from the module on."""

    module: nnx.Module
    parameters: Mapping[str, Placement]

    def placement(self, path: str) -> Placement:
        """Of one parameter.

        Raises:
            ModelConfigError: it is not declared.
        """
        found = placement(self.parameters, path)
        if found is None:
            raise ModelConfigError(
                f"{type(self.module).__name__} does not declare how its {path} is divided over devices"
            )
        return found


def across(
    config: HybridConfig, modules: Mapping[str, ShardedModule], run: Run, layout: Any, state: Any, *inputs: Any
) -> tuple[Array, Any]:
    """Calls `run(modules, layout, state, *inputs) -> (y, state)`, divided over the mesh's devices if there is a mesh.

    On each device, modules then have pieces of their weights and `state` is a piece of the store; everything else is
    whole. The y of `run` is a partial sum; the result is the sum over all devices. With many tokens, it is divided over
    the devices by tokens: the sum with the residual and the next norm then run on a device's share ("sequence
    parallelism", Korthikanti et al., 2022), and the compiler gathers what the next mixer reads.

    Of several members, each gets its share of a prefill step's many tokens only, with a `ShareLayout`.

    For whole sequences (without a store), the compiler partitions the computation, which is then differentiable.
    """
    mesh = axis_mesh()
    if mesh is None or isinstance(layout, SequenceLayout):
        return run({name: divided.module for name, divided in modules.items()}, layout, state, *inputs)
    partition = Partition.on(config, mesh)
    graphs, leaves, weights, specs = {}, {}, {}, {}
    for name, divided in modules.items():
        graphs[name], found = nnx.split(divided.module)
        leaves[name] = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(found)}
        weights[name] = {path: leaf[...] for path, (_, leaf) in leaves[name].items()}
        specs[name] = {path: partition.placed(divided.placement(path)) for path in leaves[name]}

    def rebuilt(name: str, pieces: Mapping[str, Array]) -> nnx.Module:
        filled = []
        for dotted, (path, leaf) in leaves[name].items():
            value = pieces[dotted]
            if modules[name].placement(dotted) is ADDED_ONCE:
                value = jnp.where(axis_index() == 0, value, jnp.zeros((), value.dtype))
            filled.append((path, leaf.replace(value)))
        return nnx.merge(graphs[name], nnx.from_flat_state(filled))

    def on_each_device(weights: Any, layout: Any, state: Any, *inputs: Any) -> tuple[Array, Any]:
        here = {name: rebuilt(name, weights[name]) for name in modules}
        if partition.members > 1:
            member = this_member(partition.members)
            layout = layout.on_member(member)
            layout = ShareLayout(layout, member) if divided_by > 1 else layout
        y, state = run(here, layout, state, *inputs)
        return sum_over_devices(y, scatter=scatters), state

    # Of decode rows, members have all tokens.
    tokens = layout.valid.shape[0]
    divided_by = shares_of(tokens, partition.members) if isinstance(layout, PrefillLayout) else 1
    scatters = shares_of(tokens // divided_by, partition.shards) > 1
    of_share = P(CONTEXT) if divided_by > 1 else P()
    of_sum = (P((CONTEXT, TENSOR)) if divided_by > 1 else P(TENSOR)) if scatters else of_share
    # Recorded experts are divided as the tokens are.
    of_state = {EXPERTS: of_share} if isinstance(state, Mapping) and EXPERTS in state else partition.state(state)
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=(specs, P(), of_state, *[of_share] * len(inputs)),
        out_specs=(of_sum, of_state),
        check_vma=False,
    )(weights, layout, state, *inputs)


def this_member(count: int) -> Member:
    """Returns this device's member; inside of `jax.shard_map` over the mesh only."""
    return Member(jnp.asarray(lax.axis_index(CONTEXT)), count, CONTEXT)


def on_members(run: Callable[..., Any], pages: tuple[Array, ...], *inputs: Any, reads: bool = False) -> Any:
    """Calls `run(member, pages, *inputs)` on each member, with its sub-pools; the compiler divides them over `TENSOR`.

    `run` returns the sub-pools or, with `reads`, what is the same on all members. With one member, `member` is None.
    """
    mesh = axis_mesh()
    if mesh is None or members_of(mesh) == 1:
        return run(None, pages, *inputs)

    def on_each_member(pages: tuple[Array, ...], *inputs: Any) -> Any:
        return run(this_member(members_of(mesh)), pages, *inputs)

    return jax.shard_map(
        on_each_member, mesh=mesh, in_specs=(P(CONTEXT), *[P()] * len(inputs)), out_specs=P() if reads else P(CONTEXT),
        axis_names={CONTEXT}, check_vma=False,
    )(pages, *inputs)  # fmt: skip


def run_mixer(
    config: HybridConfig,
    mixer: nnx.Module,
    parameters: Mapping[str, Placement],
    layout: Any,
    state: Any,
    x: Float[Array, "T inputs"],
    **options: Any,
) -> tuple[Array, Any]:
    """Calls a mixer, whose parameters are divided as given, as `mixer(x, layout, state, **options)`; see `across`."""

    def run(modules: Any, layout: Any, state: Any, x: Array) -> tuple[Array, Any]:
        return modules["mixer"](x, layout, state, **options)

    return across(config, {"mixer": ShardedModule(mixer, parameters)}, run, layout, state, x)


def project_whole(config: HybridConfig, linear: nnx.Module, layout: Any, x: Float[Array, "T inputs"]) -> Array:
    """Calls a dense layer on an input that is whole; each device takes its piece of it."""

    def run(modules: Any, layout: Any, state: None, x: Array) -> tuple[Array, None]:
        own = modules["linear"]
        width = own.weight.shape[1]
        here = x if x.shape[1] == width else lax.dynamic_slice_in_dim(x, axis_index() * width, width, axis=1)
        return own(here, layout.adapter), None

    return across(config, {"linear": ShardedModule(linear, of_whole_input(config))}, run, layout, None, x)[0]
