"""Kernels for all that lies between a layer's projections, and for experts, interpreted.

Prefill and decode continue each other.
"""

import dataclasses

import numpy as np
import pytest

from mamba_jax.config import MambaConfig
from mamba_jax.config.linear_recurrence import DeltaConfig
from mamba_jax.programs import KernelChoice, StepPrograms
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.fleets.step_host import TILE, Host, assert_holds, expected_logprobs, greedy
from tests.support.models.random_models import decisive_model
from tests.support.models.tiny_configs import MOE, STEP, VOCAB

pytestmark = pytest.mark.full

WIDE = dataclasses.replace(
    STEP,
    pattern="MM",
    attention=None,
    mamba=MambaConfig(num_heads=8, head_dim=32, state_size=16, num_groups=2, conv_width=4),
)
"""Groups of 128 channels."""


DELTA = dataclasses.replace(
    WIDE,
    pattern="DD",
    mamba=None,
    recurrences=(DeltaConfig(num_heads=4, head_dim=8, state_size=24, num_groups=2, conv_width=4, norm_eps=1e-5),),
)


EXPERTS = dataclasses.replace(
    WIDE, pattern="ME", moe=dataclasses.replace(MOE, latent_size=32, intermediate_size=16, gated=True)
)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (WIDE, {"gated_scan": "pallas_tpu_interpreted"}),
        (WIDE, {"gated_update": "pallas_gpu_interpreted"}),
        (DELTA, {"gated_update": "pallas_gpu_interpreted"}),
        (EXPERTS, {"expert_mlp": "pallas_gpu_interpreted"}),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else v.pattern,
)
def test_chunks_then_decode(config, named, monkeypatch):
    monkeypatch.setattr("kernels_pallas.gated_recurrence.pallas_tpu.ALIGNED", TILE)
    monkeypatch.setattr("kernels_pallas.expert_mlp.pallas_gpu.MOST", 64)
    rng = np.random.default_rng(2)
    prompt, other = ([int(t) for t in rng.integers(0, VOCAB, n)] for n in (21, 6))
    host = Host(config, num_drafts=0)
    choice = KernelChoice(named=named)
    options = {"compiler_options": QUICK_COMPILE, "greedy": True, "kernels": choice}
    host.programs = StepPrograms(decisive_model(config), tile_size=TILE, **options)
    slot = 3
    # Chunks of fewer tokens than the convolution looks back, and to the middle of a tile, behind another row.
    for begin, end in ((0, 2), (2, 13), (13, 21)):
        chunk = {"row_id": 2, "tokens": prompt[begin:end], "c": begin, "read": slot if begin else 0, "write": slot + 1}
        out = host.prefill({"tokens": other, "write": 1}, chunk)
        slot += 1
        assert_holds(host, slot, prompt[:end])
        assert_holds(host, 1, other)
    np.testing.assert_allclose(host.logprobs(slot), expected_logprobs(prompt, config)[-1], atol=1e-4)
    tokens = [int(out.tokens[1, 0])]
    for step in range(5):
        row = {"row_id": 2, "tokens": tokens[-1:], "c": 21 + step, "read": slot, "writes": [slot]}
        tokens.append(int(host.decode(row).tokens[0, 0]))
    assert tokens == greedy(prompt, 6, config)
    [(operation, implementation)] = named.items()
    assert f"{operation} by {implementation} (named)" in choice.report()
