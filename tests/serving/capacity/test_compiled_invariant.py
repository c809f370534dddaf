"""Schedule-invariant step programs compiled for a TPU and a GPU that are not at hand: every sum is a kernel's."""

from dataclasses import replace

import pytest

from checkpoints.load import load_config
from mamba_jax.batch import DecodeBatch, PrefillBatch
from tests.support.compiled_programs import compile_step, few_layers
from tests.support.selection import slow

ROWS, TOKENS, TILE = 64, 2048, 128
BATCHES = {
    "decode": DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64),
    "prefill": PrefillBatch.empty(tokens=TOKENS, rows=2, tiles=TOKENS // TILE + 2, pages_per_row=64, tile_size=TILE),
}
FEW = [("nemotron-h-8b", "M*-", "decode", "v6e-1"), ("qwen3.5-27b", "D-*", "decode", "h200-1")]
EVERY = [(*case[:2], phase, chip) for case in FEW for phase in BATCHES for chip in ("v6e-1", "h200-1")]
EVERY += [(*FEW[0][:2], phase, "v6e-8") for phase in BATCHES]


@pytest.mark.full
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
@pytest.mark.parametrize(
    ("model", "pattern", "phase", "chip"), [*FEW, *(slow(*case) for case in EVERY if case not in FEW)]
)
def test_only_kernels_add_up(model, pattern, phase, chip):
    """Eight devices are four members of two."""
    check(few_layers(model, pattern), chip, BATCHES[phase], members=4 if chip == "v6e-8" else 1)


@pytest.mark.full
@pytest.mark.tpu_compile
@pytest.mark.gpu_compile
@pytest.mark.parametrize("chip", ["v6e-1", slow("h200-1")])
def test_sums_over_a_whole_vocabulary(chip):
    """In a step that draws, with the limits of all parameters, and that reports log-probabilities."""
    config = replace(load_config("qwen3.5-27b"), pattern="-", mtp_pattern="")
    assert config.vocab_size == 248_320
    check(config, chip, BATCHES["decode"], greedy=False)


def check(config, chip, batch, **options):
    step = compile_step(
        config, chip, batch, kernels="invariant", **options,
        store={"num_slots": 2000, "num_pages": 33_000, "page_size": 64, "replay": None, "num_tails": 0},
        seats={"max_num_seqs": ROWS, "num_speculative_tokens": 0, "replay": False, "adapters": False},
    )  # fmt: skip
    assert step.program.sums_by_xla == 0
    assert step.program.aliased >= step.states + step.pages
    assert step.program.temporaries < 1e9
