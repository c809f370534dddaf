"""Step programs compiled by the TPU's own compiler: nothing is copied, and devices exchange the least there is."""

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
from serving.capacity.compiling import SlicePrograms, slice_mesh
from serving.capacity.targets import target
from serving.config import EngineConfig
from serving.core import SchedulerConfig
from serving.engine.steps.batching import BatchBuilder
from tests.support.compiled_programs import least_collectives, measured
from tests.support.selection import slow

pytestmark = pytest.mark.full

SLOTS, PAGES, PAGE, TILE = 400, 4000, 32, 128


def compiled(model, pattern, topology, batch):
    """The program of a batch, its kernels, the fewest collectives, and bytes of states and of pages of a device."""
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config(model), pattern=pattern, mtp_pattern="", vocab_size=1024)
    slice_ = target(topology)
    partition = Partition.of(config, slice_.count)
    make = partial(init_store, num_slots=SLOTS, num_pages=PAGES, page_size=PAGE, dtype=jnp.bfloat16)
    store = jax.eval_shape(partial(make, partition.store_shape(StoreShape.of(config))))
    compiler = SlicePrograms(
        HybridModel.abstract(config, dtype=jnp.bfloat16),
        slice_mesh(slice_),
        store=store,
        rows=jax.eval_shape(partial(init_rows, config, max_num_seqs=64)),
        tile_size=TILE,
    )
    program = measured(compiler, batch)
    device = partition.device_shape(StoreShape.of(config))
    states = SLOTS * device.bytes_per_slot(jnp.bfloat16)
    pages = PAGES * device.bytes_per_page(PAGE, jnp.bfloat16)
    return program, compiler.choice.report(), least_collectives(config, partition), (states, pages)


@pytest.mark.smoke
@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("model", "pattern", "topology"),
    [
        ("demo", "M*-", "v5e-1"),  # states of 64 and heads of 32: padded, but in place
        ("nemotron-h-8b", "M*-", "v5e-8"),
        ("qwen3.5-27b", "D-*-", "v6e-8"),
        slow("qwen3-next-80b-a3b", "DE*E", "v6e-8"),
        slow("qwen3-next-80b-a3b", "DE*E", "v5p-8"),
        slow("qwen3.5-27b", "D-*-", "v5p-8"),
        slow("bamba-9b", "M*-", "v6e-4"),
        slow("granite-4.0-h-small", "ME*E", "v6e-8"),
        # Four hosts each.
        slow("nemotron-h-8b", "M*-", "v5e-16"),
        slow("nemotron-h-8b", "M*-", "v6e-16"),
    ],
)
def test_decode_is_lean(model, pattern, topology):
    batch = DecodeBatch.empty(rows=16, num_speculative_tokens=0, pages_per_row=32)
    program, kernels, least, sizes = compiled(model, pattern, topology, batch)
    assert " recurrence_update by xla" not in kernels
    assert program.aliased >= sum(sizes)
    assert program.temporaries < min(sizes) / 4
    if target(topology).count == 1:
        assert not program.collectives
        return
    assert program.collectives["all-reduce"] == least["sums"] + least["norms"]
    assert program.collectives["all-gather"] == least["largest"]


@pytest.mark.tpu_compile
def test_weights_arrive_while_devices_add_up():
    batch = DecodeBatch.empty(rows=64, num_speculative_tokens=0, pages_per_row=32)
    program, *_ = compiled("nemotron-h-8b", "M-M*-", "v6e-8", batch)
    *sums, _ = program.arriving  # after the last one comes the head
    assert len(sums) == 5
    assert min(sums) > 2e6


@pytest.mark.tpu_compile
def test_prefill_divides_its_tokens():
    """Sums of a layer go to the device that has the token, and are gathered once the next norm has run."""
    tokens = 1024
    batch = PrefillBatch.empty(tokens=tokens, rows=2, tiles=tokens // TILE + 2, pages_per_row=32, tile_size=TILE)
    program, _, least, sizes = compiled("nemotron-h-8b", "M*-", "v6e-8", batch)
    assert program.aliased >= sum(sizes)
    # Embeddings are added up whole.
    assert program.collectives["all-reduce"] == 1
    assert program.collectives["reduce-scatter"] == least["sums"] - 1
    assert program.collectives["all-gather"] == least["sums"] - 1 + least["largest"]


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "granite-4.0-h-small"])
def test_attention_at_a_models_full_length_runs_by_the_kernel(model):
    """64 rows, the default page size, page tables on the device."""
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config(model), pattern="*", mtp_pattern="", vocab_size=1024)
    slice_ = target("v6e-8")
    partition = Partition.of(config, slice_.count)
    settings = SchedulerConfig(
        num_slots=SLOTS,
        num_pages=PAGES,
        page_size=EngineConfig.create().page_size_on("tpu"),
        max_model_len=config.max_position_embeddings,
    )
    sizes = {"num_slots": SLOTS, "num_pages": PAGES, "page_size": settings.page_size, "dtype": jnp.bfloat16}
    rows = partial(init_rows, config, max_num_seqs=64, pages_per_row=settings.pages_per_row)
    compiler = SlicePrograms(
        HybridModel.abstract(config, dtype=jnp.bfloat16),
        slice_mesh(slice_),
        store=jax.eval_shape(partial(init_store, partition.store_shape(StoreShape.of(config)), **sizes)),
        rows=jax.eval_shape(rows),
        tile_size=128,
    )
    program = measured(compiler, BatchBuilder(settings).empty_decode(64, 0))
    assert "paged_attention by pallas_tpu" in compiler.choice.report()
    # The rows' tables are gathered once, and the seats' are changed in place.
    table = 4 * 65 * settings.pages_per_row
    states = SLOTS * partition.device_shape(StoreShape.of(config)).bytes_per_slot(jnp.bfloat16)
    pages = PAGES * partition.device_shape(StoreShape.of(config)).bytes_per_page(settings.page_size, jnp.bfloat16)
    assert program.aliased >= states + pages + table
    assert program.temporaries < 16 << 20


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_prefill_of_a_mamba_layer_is_lean(topology):
    """Nemotron-H-8B's, 2,048 tokens: weights, activations and states, none of them laid out anew in between."""
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config("nemotron-h-8b"), pattern="M", mtp_pattern="", vocab_size=1024)
    make = partial(init_store, StoreShape.of(config), num_pages=0, page_size=PAGE, dtype=jnp.bfloat16)
    compiler = SlicePrograms(
        HybridModel.abstract(config, dtype=jnp.bfloat16),
        slice_mesh(target(topology)),
        store=jax.eval_shape(partial(make, num_slots=SLOTS)),
        rows=jax.eval_shape(partial(init_rows, config, max_num_seqs=16)),
        tile_size=128,
    )
    batch = PrefillBatch.empty(tokens=2048, rows=2, tiles=18, pages_per_row=1, tile_size=128)
    program = measured(compiler, batch)
    assert "gated_scan by pallas_tpu" in compiler.choice.report()
    assert program.moved < 0.9e9
    assert program.temporaries < 150e6
