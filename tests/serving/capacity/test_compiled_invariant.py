"""Schedule-invariant step programs compiled for a TPU and a GPU that are not at hand: every sum is a kernel's."""

import pytest

from mamba_jax.batch import DecodeBatch, PrefillBatch
from tests.support.compiled_programs import compile_step, few_layers
from tests.support.selection import slow

pytestmark = [pytest.mark.full, pytest.mark.tpu_compile, pytest.mark.gpu_compile]
ROWS, TOKENS, TILE = 64, 2048, 128
BATCHES = {
    "decode": DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64),
    "prefill": PrefillBatch.empty(tokens=TOKENS, rows=2, tiles=TOKENS // TILE + 2, pages_per_row=64, tile_size=TILE),
}
MAMBA, DELTA = ("nemotron-h-8b", "M*-"), ("qwen3.5-27b", "D-*")
WIDEST = 248_320
"""The vocabulary of the second one. A step over it draws, with the limits of all parameters, and reports
log-probabilities."""
FEW = [(*MAMBA, "decode", "v6e-1", WIDEST), (*DELTA, "decode", "h200-1", 1024)]
EVERY = [(*model, phase, chip, 1024) for model in (MAMBA, DELTA) for phase in BATCHES for chip in ("v6e-1", "h200-1")]
EVERY += [(*MAMBA, phase, "v6e-8", 1024) for phase in BATCHES]
EVERY += [(*DELTA, "decode", chip, WIDEST) for chip in ("v6e-1", "h200-1")]


@pytest.mark.parametrize(
    ("model", "pattern", "phase", "chip", "vocab_size"), [*FEW, *(slow(*case) for case in EVERY if case not in FEW)]
)
def test_only_kernels_add_up(model, pattern, phase, chip, vocab_size):
    """Eight devices are four members of two."""
    step = compile_step(
        few_layers(model, pattern, vocab_size), chip, BATCHES[phase], kernels="invariant",
        greedy=vocab_size < WIDEST, members=4 if chip == "v6e-8" else 1,
        store={"num_slots": 2000, "num_pages": 33_000, "page_size": 64, "replay": None, "num_tails": 0},
        seats={"max_num_seqs": ROWS, "num_speculative_tokens": 0, "replay": False, "adapters": False},
    )  # fmt: skip
    assert step.program.sums_by_xla == 0
    assert step.program.aliased >= step.states + step.pages
    assert step.program.temporaries < 1e9
