"""Decode of an 8B hybrid held by replay, compiled by the TPU's own compiler: in place, and how far from the least."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.drafts import NGramDrafts
from mamba_jax.model import HybridModel, parameters
from mamba_jax.store import Replay, StoreShape, init_store, store_bytes
from serving.capacity.compiling import SlicePrograms
from serving.capacity.count import Counter
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.config import EngineConfig
from tests.support.compiled_programs import compilable, compile_step, few_layers, measured
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]
SLOTS, PAGES, PAGE, MAX_LEN = 300, 4000, 32, 1024
WHOLE = [
    ("v5e-8", 64, 0, None, 1.1),
    ("v5e-8", 128, 0, None, 1.1),
    ("v5e-8", 64, 3, None, 1.15),
    ("v5e-8", 128, 3, None, 1.17),
    ("v6e-8", 64, 0, None, 1.1),
    ("v6e-8", 128, 0, None, 1.12),
    ("v6e-8", 64, 3, None, 1.17),
    ("v6e-8", 128, 3, None, 1.25),
    ("v5e-8", 64, 0, 1, 1.1),
]
"""Machine, rows, drafts, tokens between snapshots (None: the plan chooses 16), and how many times the least a program
moves at most."""


@pytest.mark.parametrize(
    ("drafts", "topology", "rows"), [(3, "v5e-8", 16), slow(3, "v5e-8", 64), *(slow(k, "v6e-8", 64) for k in (0, 3))]
)
def test_few_layers(drafts, topology, rows):
    """Store and tails are updated in place, without a second buffer of their size, and other slots are unchanged."""
    config, replay = few_layers("nemotron-h-8b", "M*-"), Replay(16, drafts)
    store = {"num_slots": SLOTS, "num_pages": PAGES, "page_size": PAGE, "replay": replay, "num_tails": 1 + rows}
    seats = {"max_num_seqs": rows, "num_speculative_tokens": drafts, "max_len": MAX_LEN, "replay": True}
    batch = DecodeBatch.empty(rows=rows, num_speculative_tokens=drafts, pages_per_row=MAX_LEN // PAGE, replay=True)
    source = NGramDrafts(2, 4) if drafts else None
    step = compile_step(config, topology, batch, store=store, seats=seats, source=source)
    program, device = step.program, step.partition.device_shape(StoreShape.of(config))
    slots, tails = device.bytes_per_slot(jnp.bfloat16), device.bytes_per_tail(jnp.bfloat16, "float32", replay)
    assert program.aliased >= step.states + (1 + rows) * tails + step.pages
    described = partial(init_store, step.partition.store_shape(StoreShape.of(config)), dtype=jnp.bfloat16, **store)
    assert program.aliased <= store_bytes(jax.eval_shape(described))
    assert program.temporaries < rows * slots
    operations = ("recurrence_replay", "read_windows", "write_windows")
    assert all(f"{operation} by pallas_tpu" in step.kernels for operation in operations)
    wide = parameters(HybridModel.abstract(config, dtype=jnp.bfloat16))
    counter = Counter(config, step.partition, wide, ssm_dtype=jnp.dtype("float32"))
    least = counter.decode(rows=rows, drafts=drafts, context=0, replay=replay).bytes
    print(f"{program.traffic.total() / least:.3f} x {least / 1e6:.1f} MB")
    # Weights of so few layers fit into the larger vector memory, and fetching them ahead counts as a write and a read.
    fetched_ahead = 0 if topology == "v5e-8" else 2 * program.weights
    assert program.traffic.total() <= 1.3 * least + fetched_ahead


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "rows", "drafts", "interval", "most"), WHOLE)
def test_whole_programs(topology, rows, drafts, interval, most, monkeypatch):
    """As `mamba-jax plan` compiles them, on a slice whose memory is full (figures: docs/compiler-measurements.md)."""

    def compile_measured(programs, batches, progress):
        return [measured(programs, batch, name) for name, batch in batches if name.startswith("decode")]

    compilable(topology)
    monkeypatch.setattr(SlicePrograms, "compile", compile_measured)
    monkeypatch.setattr("serving.capacity.plan.SlicePrograms", partial(SlicePrograms, greedy=True))
    flags = {"num_speculative_tokens": drafts, "speculative_method": "ngram"} if drafts else {}
    config = EngineConfig.create(model="nemotron-h-8b", max_num_seqs=rows, replay_interval=interval, **flags)
    plan = make_plan(config, target(topology), context=1)
    (program,), least = plan.programs, plan.steps[-1].work.bytes  # those of a step without keys and values
    print(f"{program.traffic.total() / least:.3f} x {least / 1e9:.2f} GB, {plan.size}, {program}")
    assert plan.size.replay_interval == (interval or 16)
    assert program.aliased >= plan.size.total_bytes
    assert program.traffic.total() <= most * least
    assert plan.fits
