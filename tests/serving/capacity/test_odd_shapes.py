"""Shapes that no published size has, compiled for TPU and GPU: three groups, states of 96, heads of 48; of gated delta
nets two heads to a group, keys of 40, heads of 24.

Whatever implementation takes them, the store is updated in place.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from checkpoints.load import load_config
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.model import HybridModel
from mamba_jax.rows import init_rows
from mamba_jax.sharding import Partition
from mamba_jax.store import StoreShape, init_store
from mamba_jax.store_layout import lanes_of
from serving.capacity.compiling import SlicePrograms, check_compiler, slice_mesh
from serving.capacity.targets import target
from serving.config import ConfigError
from tests.support.compiled_programs import measured

pytestmark = pytest.mark.full

STORE, TILE, ROWS = 140_000_000, 32, 8


def batch(kind):
    if kind == "decode":
        return DecodeBatch.empty(rows=ROWS, num_speculative_tokens=3, pages_per_row=1)
    return PrefillBatch.empty(tokens=256, rows=2, tiles=10, pages_per_row=1, tile_size=TILE)


def marks(topology, *more):
    return [pytest.mark.tpu_compile if topology.startswith("v") else pytest.mark.gpu_compile, *more]


def mamba():
    config = load_config("nemotron-h-8b")
    odd = dataclasses.replace(config.mamba, num_heads=9, head_dim=48, num_groups=3, state_size=96)
    return dataclasses.replace(config, mamba=odd, pattern="M", mtp_pattern="", vocab_size=256)


def delta():
    config = load_config("qwen3.5-27b")
    odd = dataclasses.replace(config.recurrences[0], num_heads=6, head_dim=24, num_groups=3, state_size=40)
    return dataclasses.replace(config, recurrences=(odd,), pattern="D", mtp_pattern="", vocab_size=256)


@pytest.mark.parametrize(
    ("topology", "kind", "odd"),
    [
        pytest.param("v5e-1", "decode", mamba, marks=marks("v5e-1")),
        pytest.param("h200-1", "prefill", mamba, marks=marks("h200-1")),
        pytest.param("v5e-1", "prefill", mamba, marks=marks("v5e-1", pytest.mark.slow)),
        pytest.param("h200-1", "decode", mamba, marks=marks("h200-1", pytest.mark.slow)),
        pytest.param("h200-1", "decode", delta, marks=marks("h200-1")),
        pytest.param("h200-1", "prefill", delta, marks=marks("h200-1")),
        pytest.param("v5e-1", "decode", delta, marks=marks("v5e-1", pytest.mark.slow)),
        pytest.param("v5e-1", "prefill", delta, marks=marks("v5e-1", pytest.mark.slow)),
    ],
)
def test_store_is_updated_in_place(topology, kind, odd):
    machine = target(topology)
    try:
        check_compiler(machine)
    except ConfigError as error:
        pytest.skip(str(error))
    config = odd()
    shape = StoreShape.of(config)
    slots = STORE // shape.bytes_per_slot(jnp.bfloat16)
    make = partial(init_store, shape, num_slots=slots, num_pages=0, page_size=64, dtype=jnp.bfloat16)
    compiler = SlicePrograms(
        HybridModel.abstract(config, dtype=jnp.bfloat16),
        slice_mesh(machine),
        store=jax.eval_shape(make),
        rows=jax.eval_shape(partial(init_rows, config, max_num_seqs=ROWS, num_speculative_tokens=3)),
        tile_size=TILE,
    )
    program = measured(compiler, batch(kind))
    device = dataclasses.replace(Partition.of(config, 1).device_shape(shape), lanes=lanes_of(machine.device.platform))
    store = slots * device.bytes_per_slot(jnp.bfloat16)
    assert program.aliased >= store
    # The activations of a few rows: nothing of the store's size.
    assert program.temporaries < store / 4
