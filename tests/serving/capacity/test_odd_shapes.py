"""Shapes that no published size has, compiled for TPU and GPU: three groups, states of 96, heads of 48; of gated delta
nets two heads to a group, keys of 40, heads of 24.

Whatever implementation takes them, the store is updated in place.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.store import StoreShape
from mamba_jax.store_layout import lanes_of
from tests.support.compiled_programs import compilable, compile_step, few_layers

pytestmark = pytest.mark.full

STORE, TILE, ROWS = 140_000_000, 32, 8


def batch(kind):
    if kind == "decode":
        return DecodeBatch.empty(rows=ROWS, num_speculative_tokens=3, pages_per_row=1)
    return PrefillBatch.empty(tokens=256, rows=2, tiles=10, pages_per_row=1, tile_size=TILE)


def mamba():
    config = few_layers("nemotron-h-8b", "M", vocab_size=256)
    odd = dataclasses.replace(config.mamba, num_heads=9, head_dim=48, num_groups=3, state_size=96)
    return dataclasses.replace(config, mamba=odd)


def delta():
    config = few_layers("qwen3.5-27b", "D", vocab_size=256)
    odd = dataclasses.replace(config.recurrences[0], num_heads=6, head_dim=24, num_groups=3, state_size=40)
    return dataclasses.replace(config, recurrences=(odd,))


COMPILERS = {"v5e-1": pytest.mark.tpu_compile, "h200-1": pytest.mark.gpu_compile}
FEW = [("v5e-1", "decode", mamba), ("h200-1", "decode", mamba), ("h200-1", "prefill", delta)]
REST = [case for case in itertools.product(COMPILERS, ("decode", "prefill"), (mamba, delta)) if case not in FEW]


@pytest.mark.parametrize(
    ("topology", "kind", "odd"),
    [
        *(pytest.param(*case, marks=COMPILERS[case[0]]) for case in FEW),
        *(pytest.param(*case, marks=[COMPILERS[case[0]], pytest.mark.slow]) for case in REST),
    ],
)
def test_store_is_updated_in_place(topology, kind, odd):
    config, shape = odd(), StoreShape.of(odd())
    sizes = {"num_slots": STORE // shape.bytes_per_slot(jnp.bfloat16), "num_pages": 0, "page_size": 64}
    seats = {"max_num_seqs": ROWS, "num_speculative_tokens": 3}
    step = compile_step(config, topology, batch(kind), store=sizes, seats=seats, tile_size=TILE)
    lanes = lanes_of(compilable(topology).device.platform)
    device = dataclasses.replace(step.partition.device_shape(shape), lanes=lanes)
    store = sizes["num_slots"] * device.bytes_per_slot(jnp.bfloat16)
    assert step.program.aliased >= store
    # The activations of a few rows: nothing of the store's size.
    assert step.program.temporaries < store / 4
