"""A layer of experts divided over the chips of a slice, compiled by the TPU's own compiler."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from checkpoints import load_config
from kernels_pallas.dispatch import KernelChoice
from mamba_jax.config import MOE
from mamba_jax.modules.feed_forward import MoE
from mamba_jax.sharding import Partition, replicated, use_mesh
from mamba_jax.sharding.across import ShardedModule, across
from mamba_jax.sharding.parameters import mixer_placements
from serving.capacity.compiling import slice_mesh
from tests.support.compiled_programs import compilable
from tests.support.hlo_traffic import Traffic

pytestmark = [pytest.mark.tpu_compile, pytest.mark.slow]


class Valid(NamedTuple):
    """All that experts ask of a layout."""

    valid: Any


@pytest.mark.parametrize(
    ("name", "machine", "megabytes", "temporary"),
    [("qwen3-next-80b-a3b", "v6e-8", 700, 20), ("nemotron-3-super-120b-a12b", "v6e-8", 2000, 100)],
)
def test_prefill_moves_a_devices_own_rows(name, machine, megabytes, temporary):
    """Of 2,048 tokens; with the rows of all experts on every chip it was 2.5 and 7.7 GB, plus 350 and 440 MB."""
    config, mesh = load_config(name), slice_mesh(compilable(machine))
    moe = nnx.eval_shape(lambda: MoE(config.moe, config.hidden_size, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    placements, partition = mixer_placements(config, MOE, 0), Partition.of(config, mesh.size)
    divided = ShardedModule(moe, placements)
    graph, state = nnx.split(moe)
    flat = nnx.to_flat_state(state)

    def placed(path, leaf):
        spec = partition.placed(divided.placement(".".join(map(str, path))))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def layer(weights, x, valid):
        filled = [(path, leaf.replace(weight)) for (path, leaf), weight in zip(flat, weights, strict=True)]
        modules = {"moe": ShardedModule(nnx.merge(graph, nnx.from_flat_state(filled)), placements)}
        return across(config, modules, lambda m, layout, s, x: m["moe"](x, layout, s), Valid(valid), None, x)[0]

    whole = replicated(mesh)
    x = jax.ShapeDtypeStruct((2048, config.hidden_size), jnp.bfloat16, sharding=whole)
    valid = jax.ShapeDtypeStruct((2048,), jnp.bool_, sharding=whole)
    weights = [placed(path, leaf.get_value()) for path, leaf in flat]
    with use_mesh(mesh), KernelChoice(platform="tpu", device=mesh.devices.flat[0]).applied():
        compiled = jax.jit(layer).lower(weights, x, valid).compile()
    text = compiled.as_text()
    assert Traffic(text).total() < megabytes * 1e6
    assert compiled.memory_analysis().temp_size_in_bytes < temporary * 1e6
    assert text.count(" reduce-scatter(") == 1
    assert not re.search(r" all-reduce(-start)?\(", text)
