"""A mixed step, compiled for machines that are not at hand: it reads the weights once and copies no store."""

import pytest

from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from tests.serving.capacity.test_compiled_for_gpu import ROWS, TILE, TOKENS, check, compiled_for

pytestmark = pytest.mark.full
DECODE = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64)
PREFILL = PrefillBatch.empty(tokens=TOKENS, rows=2, tiles=TOKENS // TILE + 2, pages_per_row=64, tile_size=TILE)
MODEL, PATTERN = "nemotron-3-nano-30b-a3b", "ME*"


@pytest.mark.slow
def test_weights_are_read_once_on_tpu():
    alone = [compiled_for(MODEL, PATTERN, "v6e-1", 0, batch)[0] for batch in (DECODE, PREFILL)]
    program, store, _ = compiled_for(MODEL, PATTERN, "v6e-1", 0, MixedBatch(DECODE, PREFILL))
    print([(each.weights, each.moved) for each in (*alone, program)])
    assert program.aliased >= store
    assert program.temporaries < 2 * max(each.temporaries for each in alone)
    assert program.weights <= 1.1 * max(each.weights for each in alone)
    assert program.moved <= 0.75 * sum(each.moved for each in alone)


@pytest.mark.gpu_compile
def test_a_mixed_step_is_lean_on_gpu():
    program, store, kernels = compiled_for(MODEL, PATTERN, "h200-1", 0, MixedBatch(DECODE, PREFILL))
    print(program, kernels)
    check(program, store)
    # As of prefill: the loop over log-probabilities of prompts is no part of a graph.
    assert program.launches["kWhile"] == 1
    assert set(program.launches) <= {"kCommandBuffer", "kWhile", "kCopy"}
    assert not [by for by in (" recurrence_update by xla", " recurrence_scan by xla") if by in kernels]
