"""The engine on the kernels (interpreted) gives the tokens that it gives on plain JAX, under reuse and preemption."""

import logging
import random

import pytest

from mamba_jax.programs import KernelChoice, StepPrograms
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import QUICK_COMPILE

NAMED = {"recurrence_update": "pallas_tpu_interpreted", "recurrence_scan": "pallas_tpu_interpreted"}


@pytest.mark.slow
def test_same_tokens_by_kernels(harness):
    rng = random.Random(3)
    shared = harness.prompt(rng, 64)
    prompts = [harness.prompt(rng, n) for n in (1, 16, 33, 70, 97)] + [shared + harness.prompt(rng, 9)] * 5
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = harness.run(harness.engine("all"), prompts, params)
    programs = StepPrograms(
        harness.model,
        tile_size=harness.flags["tile_size"],
        compiler_options=QUICK_COMPILE,
        greedy=True,
        kernels=KernelChoice(named=NAMED),
    )
    # A pool that makes requests throw each other out.
    engine = harness.engine("all", programs=programs, num_slots=12)
    for prompt, one, other in zip(prompts, harness.run(engine, prompts, params), plain, strict=True):
        harness.assert_greedy(prompt, one.outputs[0].token_ids, other.outputs[0].token_ids)
    assert "recurrence_scan by pallas_tpu_interpreted (named)" in programs.kernels.report()


def test_a_malformed_kernel_choice_is_refused(harness):
    with pytest.raises(ConfigError, match="kernels: 'update' is not operation=implementation"):
        assemble(EngineConfig.create(**harness.flags, kernels="recurrence_scan=xla,update"), harness.model)


def test_start_up_tells_how_bfloat16_weights_are_multiplied(harness, caplog, monkeypatch):
    monkeypatch.setattr(KernelChoice, "products", lambda self: "C++ products use avx2")
    with caplog.at_level(logging.INFO, logger="serving"):
        harness.engine("align")
    assert caplog.messages.count("C++ products use avx2") == 1
