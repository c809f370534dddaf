"""Steps with drafters, compiled by the TPU's own compiler: they are divided, and the store is updated in place."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from checkpoints.load import load_config
from mamba_jax.batch import DecodeBatch
from mamba_jax.config import AttentionConfig, MLPConfig, QKNormConfig, RopeConfig
from mamba_jax.config.drafter import BlockConfig, EagleConfig
from mamba_jax.drafts import BlockDrafts, MTPDrafts
from mamba_jax.model import HybridModel
from mamba_jax.rows import init_rows
from mamba_jax.sharding import Partition
from mamba_jax.store import StoreShape, init_store
from serving.capacity.compiling import SlicePrograms, slice_mesh
from serving.capacity.targets import target
from tests.support.compiled_programs import measured
from tests.support.selection import slow

SLOTS, PAGES, PAGE, DRAFTS = 400, 2000, 128, 3
_ATTENTION = AttentionConfig(
    num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, input_size=1024, rope=RopeConfig(1e4, 128)
)
_SIZES = {
    "hidden_size": 1024,
    "vocab_size": 1024,
    "places": (1, 2),
    "mlp": MLPConfig(2048, "silu", gated=True),
    "norm_eps": 1e-6,
    "own_embedding": True,
}
_NORMED = dataclasses.replace(_ATTENTION, qk_norm=QKNormConfig(1e-6))
DRAFTERS = {
    "eagle3": (EagleConfig(attention=_ATTENTION, maps_vocabulary=True, **_SIZES), MTPDrafts()),
    "dspark": (
        BlockConfig(attention=_NORMED, num_layers=2, markov_rank=256, from_newest=True, **_SIZES),
        BlockDrafts(0, from_newest=True),
    ),
}


@pytest.mark.full
@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["eagle3", slow("dspark")])
def test_a_drafter_copies_nothing(name):
    pytest.importorskip("libtpu")
    drafter, source = DRAFTERS[name]
    small = dataclasses.replace(load_config("nemotron-h-8b"), pattern="M*-", mtp_pattern="", vocab_size=1024)
    config, slice_ = small.with_drafter(drafter), target("v5e-8")
    partition, shape = Partition.of(config, slice_.count), StoreShape.of(config)
    make = partial(init_store, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.bfloat16)
    rows = partial(init_rows, config, max_num_seqs=16, num_speculative_tokens=DRAFTS, source=source, max_len=1024)
    compiler = SlicePrograms(
        HybridModel.abstract(config, dtype=jnp.bfloat16),
        slice_mesh(slice_),
        store=jax.eval_shape(partial(make, partition.store_shape(shape))),
        rows=jax.eval_shape(rows),
        tile_size=128,
        source=source,
    )
    batch = DecodeBatch.empty(rows=16, num_speculative_tokens=DRAFTS, pages_per_row=16)
    program = measured(compiler, batch)
    device = partition.device_shape(shape)
    states = SLOTS * device.bytes_per_slot(jnp.bfloat16)
    pages = PAGES * device.bytes_per_page(PAGE, jnp.bfloat16)
    assert program.aliased >= states + pages
    assert program.temporaries < min(states, pages) / 4
