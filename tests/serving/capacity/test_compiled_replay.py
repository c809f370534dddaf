"""Decode of an 8B hybrid held by replay, compiled by the TPU's own compiler: in place, and how far from the least."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from checkpoints.load import load_config
from mamba_jax.batch import DecodeBatch
from mamba_jax.drafts import NGramDrafts
from mamba_jax.model import HybridModel, parameters
from mamba_jax.rows import init_rows
from mamba_jax.sharding import Partition
from mamba_jax.store import StoreShape, init_store, store_bytes
from mamba_jax.tails import Replay
from serving.capacity.compiling import SlicePrograms, slice_mesh
from serving.capacity.count import Counter, decode_workload
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.config import EngineConfig
from tests.support.compiled_programs import measured
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]
SLOTS, PAGES, PAGE, ROWS, MAX_LEN = 300, 4000, 32, 64, 1024
WHOLE = [
    ("v5e-8", 64, 0, 1.25, 1.1),
    ("v5e-8", 128, 0, 1.25, 1.1),
    ("v5e-8", 64, 3, 1.4, 1.15),
    ("v5e-8", 128, 3, 1.4, 1.17),
    ("v6e-8", 64, 0, 1.25, 1.1),
    ("v6e-8", 128, 0, 1.25, 1.12),
    ("v6e-8", 64, 3, 1.4, 1.17),
    ("v6e-8", 128, 3, 1.4, 1.25),
]
"""Machine, rows, drafts, the most states that are moved for each row, the most times the least that all is moved."""


@pytest.mark.parametrize(("drafts", "topology"), [(3, "v5e-8"), *(slow(k, "v6e-8") for k in (0, 3))])
def test_few_layers(drafts, topology):
    """Store and tails are updated in place, without a second buffer of their size, and other slots are unchanged."""
    pytest.importorskip("libtpu")
    config = dataclasses.replace(load_config("nemotron-h-8b"), pattern="M*-", mtp_pattern="", vocab_size=1024)
    slice_, replay = target(topology), Replay(16, drafts)
    partition, source = Partition.of(config, slice_.count), NGramDrafts(2, 4) if drafts else None
    store = jax.eval_shape(
        partial(
            init_store,
            partition.store_shape(StoreShape.of(config)),
            num_slots=SLOTS,
            num_pages=PAGES,
            page_size=PAGE,
            dtype=jnp.bfloat16,
            replay=replay,
            num_tails=1 + ROWS,
        )
    )
    rows = partial(
        init_rows,
        config,
        max_num_seqs=ROWS,
        num_speculative_tokens=drafts,
        source=source,
        max_len=MAX_LEN,
        replay=True,
    )
    model = HybridModel.abstract(config, dtype=jnp.bfloat16)
    compiler = SlicePrograms(
        model,
        slice_mesh(slice_),
        store=store,
        rows=jax.eval_shape(rows),
        tile_size=128,
        source=source,
    )
    batch = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=drafts, pages_per_row=MAX_LEN // PAGE, replay=True)
    program = measured(compiler, batch)
    device = partition.device_shape(StoreShape.of(config))
    slots, tails = device.bytes_per_slot(jnp.bfloat16), device.bytes_per_tail(jnp.bfloat16, "float32", replay)
    pages = PAGES * device.bytes_per_page(PAGE, jnp.bfloat16)
    assert program.aliased >= SLOTS * slots + (1 + ROWS) * tails + pages
    assert program.aliased <= store_bytes(store)
    assert program.temporaries < ROWS * slots
    report = compiler.choice.report()
    assert all(f"{kernel} by pallas_tpu" in report for kernel in ("recurrence_replay", "read_windows", "write_windows"))
    counter = Counter(config, partition, parameters(model), ssm_dtype=jnp.dtype("float32"))
    least = counter.work(decode_workload(rows=ROWS, drafts=drafts, context=0, replay=replay)).bytes
    print(f"{program.moved / least:.3f} x {least / 1e6:.1f} MB")
    # Weights of so few layers fit into the larger vector memory, and fetching them ahead counts as a write and a read.
    fetched_ahead = 0 if topology == "v5e-8" else 2 * program.weights
    assert program.moved <= 1.3 * least + fetched_ahead


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "rows", "drafts", "states", "most"), WHOLE)
def test_whole_programs(topology, rows, drafts, states, most, monkeypatch):
    """As `mamba-jax plan` compiles them, on a slice whose memory is full: docs/hardware.md has the figures."""
    pytest.importorskip("libtpu")
    plan, program, least = planned(topology, rows, drafts, monkeypatch)
    assert plan.size.replay_interval == 16  # chosen, not asked for
    load = decode_workload(rows=rows, drafts=drafts, context=0, replay=Replay(16, drafts))
    assert load.states_read + load.states_written <= states * rows
    assert program.aliased >= plan.size.total_bytes
    assert program.moved <= most * least
    assert plan.fits


@pytest.mark.slow
def test_a_whole_program_of_snapshots(monkeypatch):
    pytest.importorskip("libtpu")
    plan, program, least = planned("v5e-8", 64, 0, monkeypatch, replay_interval=1)
    assert program.aliased >= plan.size.total_bytes
    assert program.moved <= 1.1 * least


def planned(topology, rows, drafts, monkeypatch, **flags):
    """The plan, its decode program, and the least bytes of a decode step without keys and values."""

    def compile_measured(programs, batches, progress):
        return [measured(programs, batch, name) for name, batch in batches if name.startswith("decode")]

    monkeypatch.setattr(SlicePrograms, "compile", compile_measured)
    flags |= {"num_speculative_tokens": drafts, "speculative_method": "ngram"} if drafts else {}
    plan = make_plan(
        EngineConfig.create(model="nemotron-h-8b", max_num_seqs=rows, **flags), target(topology), context=1
    )
    (program,), least = plan.programs, plan.steps[-1].work.bytes
    print(f"{program.moved / least:.3f} x {least / 1e9:.2f} GB, {plan.size}, {program}")
    return plan, program, least
