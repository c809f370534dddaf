"""Decode with LoRA adapters, compiled for machines that are not at hand: the bytes that adapters add to a step."""

import pytest

from mamba_jax.batch import DecodeBatch
from tests.serving.capacity.test_compiled_for_gpu import ONE_GRAPH, ROWS, check, compiled_for

pytestmark = pytest.mark.full
BATCH = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64)
MODEL, PATTERN = "nemotron-h-8b", "M*-"
LORAS = [(1, 16), (4, 16)]


@pytest.mark.slow
def test_adapters_are_read_once_on_tpu():
    plain, store, _ = compiled_for(MODEL, PATTERN, "v6e-1", 0, BATCH)
    for lora in LORAS:
        program, _, _ = compiled_for(MODEL, PATTERN, "v6e-1", 0, BATCH, lora=lora)
        print(lora, [(each.weights, each.moved, each.temporaries) for each in (plain, program)])
        assert program.aliased >= store
        assert program.weights <= 1.1 * plain.weights
        assert program.moved <= 1.1 * plain.moved


@pytest.mark.gpu_compile
@pytest.mark.parametrize("lora", LORAS, ids=str)
def test_decode_with_adapters_is_lean_on_gpu(lora):
    program, store, _ = compiled_for(MODEL, PATTERN, "h200-1", 0, BATCH, lora=lora)
    print(lora, program)
    check(program, store)
    assert program.launches == ONE_GRAPH
