"""Steps with drafters, compiled by the TPU's own compiler: they are divided, and the store is updated in place."""

import dataclasses

import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.config import AttentionConfig, MLPConfig, QKNormConfig, RopeConfig
from mamba_jax.config.drafter import BlockConfig, EagleConfig
from mamba_jax.drafts import BlockDrafts, MTPDrafts
from tests.support.compiled_programs import compile_step, few_layers
from tests.support.selection import slow

DRAFTS, STORE = 3, {"num_slots": 400, "num_pages": 2000, "page_size": 128}
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
    drafter, source = DRAFTERS[name]
    config = few_layers("nemotron-h-8b", "M*-").with_drafter(drafter)
    batch = DecodeBatch.empty(rows=16, num_speculative_tokens=DRAFTS, pages_per_row=16)
    seats = {"max_num_seqs": 16, "num_speculative_tokens": DRAFTS, "max_len": 1024}
    step = compile_step(config, "v5e-8", batch, store=STORE, seats=seats, source=source)
    assert step.program.aliased >= step.states + step.pages
    assert step.program.temporaries < min(step.states, step.pages) / 4
