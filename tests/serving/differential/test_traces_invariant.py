"""Random traffic of schedule-invariant engines: every log-probability has the bits of the plain run.

Those of prompts have the bits of the training forward. Steps have several shapes, and recurrences, dtypes, drafts, a
prefill side, cache modes, chunks, preemption, aborts and failing steps vary. See `traces.draw`.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from kernels_pallas import fixed_order
from kernels_pallas.native import WHY_MISSING
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.paged_attention import xla as attention_xla
from kernels_pallas.recurrence import api as recurrence_api
from kernels_pallas.recurrence import native
from kernels_pallas.recurrence.scan import xla as scan_xla
from tests.serving.differential.faults import BITS, Fault, Patch, fault
from tests.serving.differential.judging import Divergence
from tests.serving.differential.traces import draw, run_trace, run_traces
from tests.support.engines.shared_engines import INVARIANT, INVARIANT_MODELS, SMALLEST, TILE, engines_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}"),
]

FIRST = 70_000_000
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"drafts": True},
    "split": {"split": True},
    "adapters": {"adapters": True},
    "mixed": {"mixed": True},
}


def run(first: int, count: int, name: str, *hows: str) -> Counter[str]:
    """Runs so many traces in each of these ways. No comparison may be cut short: bits that are equal have no ties."""
    met = sum((run_traces(first, count, reached=["cached_tokens"], model=name, **HOW[how]) for how in hows), Counter())
    assert met["cut"] == 0
    return met


@pytest.mark.fuzz
@pytest.mark.parametrize("model", INVARIANT_MODELS)
def test_bits_of_each_recurrence(model: str) -> None:
    dtype = ("float32", "bfloat16")[INVARIANT_MODELS.index(model) % 2]
    assert run(FIRST, 5, f"{model}, invariant {dtype}", "plain", "split")["arrived"]


@pytest.mark.fuzz
def test_bits_with_drafts() -> None:
    met = run(FIRST, 10, f"{SMALLEST}, invariant bfloat16", "drafts")
    assert all(met[f"accepted {source}"] for source in ("mtp", "ngram", "right", "mixed"))


@pytest.mark.fuzz
def test_bits_in_mixed_steps() -> None:
    assert run(FIRST, 4, "delta, invariant float32", "mixed")["mixed"]


@pytest.mark.fuzz
def test_bits_with_adapters() -> None:
    assert run(FIRST, 5, "nemotronh, invariant bfloat16", "adapters")["lora"]


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", INVARIANT)
def test_more_bits(name: str, how: str, request: pytest.FixtureRequest) -> None:
    """`--examples` is the number of requests of all cases together."""
    traces = int(request.config.getoption("--examples")) // (len(INVARIANT) * len(HOW) * _REQUESTS)
    run(FIRST + 1_000, max(1, traces), name, how)


_REQUESTS = 5
"""Of a trace: 5.5 on average, rounded down so that no fewer than `--examples` run."""


@fault(64, "a program with few rows adds the terms of a product in another order", "bits", table=BITS)
def another_order_for_few_rows(patch: Patch) -> None:
    sound = fixed_order.product

    def product(rows, weight):
        turned = slice(None, None, -1) if len(rows) < 3 else slice(None)
        return sound(rows[:, turned], weight[:, turned])

    patch.setattr(fixed_order, "product", product)


@fault(65, "pieces of keys are shorter where a step has many blocks of queries", "bits", table=BITS)
def attention_in_pieces_by_batch(patch: Patch) -> None:
    def attention(q, kv, **layout):
        with pytest.MonkeyPatch.context() as short:
            short.setattr(attention_xla, "QUERIES", 16 if q.shape[0] > 3 else 128)
            return attention_xla.paged_attention(q, kv, **layout)

    patch.setattr(attention_api, "PAGED", (fixed_order.implementation(attention),))


@fault(66, "a chunk computes a tile's states at once, not token by token as decode does", "bits", table=BITS)
def states_of_a_tile_at_once(patch: Patch) -> None:
    patch.setattr(recurrence_api, "SCAN", (fixed_order.implementation(scan_xla.scan),))


@fault(67, "a chunk publishes a state whose last bit differs from the one that it continues from", "bits", table=BITS)
def another_last_bit_in_stored_states(patch: Patch) -> None:
    def scan(entry, store, tiles, **recurrence):
        y, store = native.scan(entry, store, tiles, **recurrence)
        return y, store.at[tiles.write_slot].set(jnp.nextafter(store[tiles.write_slot], jnp.inf))

    patch.setattr(recurrence_api, "SCAN", (fixed_order.implementation(scan),))


@pytest.mark.parametrize("planted", BITS.values(), ids=lambda fault: f"D{fault.number}-{fault.plant.__name__}")
def test_a_fault_that_changes_only_bits_shows(planted: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{SMALLEST}, invariant float32"
    on = engines_of(name)
    seeds = range(FIRST, FIRST + 12)
    for seed in seeds:
        draw(seed, model=name)  # with references of sound programs
    planted.plant(monkeypatch)
    monkeypatch.setattr(on, "_programs", {(TILE, 0): on.compile_anew()})
    with pytest.raises(Divergence):
        [run_trace(seed, model=name) for seed in seeds]


def test_the_table_is_complete() -> None:
    table = (Path(__file__).parents[3] / "docs" / "mutations.md").read_text()
    for number, planted in BITS.items():
        assert re.search(rf"^\| D{number} \| {re.escape(planted.fault)} \| {planted.cases} \|", table, re.MULTILINE)
