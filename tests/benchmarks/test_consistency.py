"""Serving and training find the engine's tokens equally likely, and it would show if they did not."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

from benchmarks import consistency
from benchmarks.consistency import ARRANGEMENTS, OTHER_SHAPES, Agreement, agreements
from checkpoints.adapters.adapter_export import target_layers
from checkpoints.load import load_model
from checkpoints.random import write_random
from kernels_pallas import native
from mamba_jax.model import parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.train.additions import is_trained, new_adapter
from mamba_jax.train.policy import PolicyTrainer
from mamba_jax.train.score import SCORE_OPTIONS, score
from serving.cli.training.rollouts import Rollouts, ServedAdapter
from serving.cli.training.train_grpo import train_grpo
from serving.config import ConfigError
from serving.engine.llm import LLM
from tests.support.engines.engines import OPTIMIZED, QUICK_COMPILE
from tests.support.models.divisible_checkpoints import GOLDEN
from tests.support.models.tiny_configs import TRAINABLE
from tests.support.selection import slow

needs_native = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")
FLAGS = {
    "max_model_len": 96, "max_num_seqs": 4, "tile_size": 16, "state_block_size": 32, "num_slots": 40, "num_pages": 80,
}  # fmt: skip


def test_the_estimate_by_hand():
    served, trained = np.log([0.5, 0.25]), np.log([0.25, 0.25])
    found = Agreement.of("by hand", served, trained)
    np.testing.assert_allclose((found.kl, found.largest), ((0.5 - 1 + np.log(2)) / 2, np.log(2)))


@pytest.mark.full
def test_serving_and_training_agree(tmp_path, monkeypatch):
    name = "drafts (MTP, K=3), hits"
    monkeypatch.setattr(
        "serving.engine.assembly.build.StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE)
    )
    monkeypatch.setattr(consistency, "ARRANGEMENTS", {name: ARRANGEMENTS[name]})
    directory = write_random(tmp_path, TRAINABLE)
    model = load_model(directory, progress=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 40 for j in range(40)]} for i in range(4)]
    served, other = agreements(str(directory), model, prompts, max_tokens=12, flags=FLAGS)
    assert (served.arrangement, other.arrangement) == (name, OTHER_SHAPES)
    assert served.tokens == 2 * 4 * 12
    assert served.cached_tokens >= 4 * 32
    assert abs(served.kl) < 1e-8
    assert abs(other.kl) < 1e-8
    norm = parameters(model)["final_norm.weight"]
    norm.set_value(1.01 * norm.get_value())  # a model that is another one by a little
    assert agreements(str(directory), model, prompts, max_tokens=12, flags=FLAGS)[0].kl > 1e-8


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("lora", [False, slow(True)])
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32")])
def test_the_first_update_of_a_schedule_invariant_trainer_has_ratios_of_1(dtype, lora, tmp_path):
    directory = write_random(tmp_path / "model", TRAINABLE)
    llm = LLM(str(directory), **FLAGS, dtype=dtype, schedule_invariant=True, enable_lora=lora, max_lora_rank=4)
    values = {path: leaf.get_value() for path, leaf in parameters(llm.model).items()}
    request = None
    if lora:
        adapter = new_adapter(llm.model.config, target_layers(llm.model.config), rank=2, alpha=3.0, seed=0)
        values |= {name: value if value.any() else 0.1 + 0 * value for name, value in adapter.items()}
        served = ServedAdapter(llm, tmp_path / "served", alpha=3.0, base=str(directory))
        served.update(values)
        request = served.lora_request
    rollouts = Rollouts(
        llm, lambda answer: float(sum(answer.token_ids) % 7), samples=2, max_tokens=20, length=60, lora_request=request
    )
    answers, _ = rollouts.sample([{"prompt_token_ids": [(7 * i + j) % 40 for j in range(20 + i)]} for i in range(3)], 0)

    def trainer(schedule_invariant):
        options = {"dtype": dtype, "schedule_invariant": schedule_invariant}
        if lora:
            options["trained"] = is_trained
        return PolicyTrainer(llm.model.config, values, optax.sgd(0.1), **options)

    exact = trainer(True)
    first, second = exact.step(answers), exact.step(answers)
    assert first["kl"] == first["clipped"] == 0
    assert first["gradient_norm"] > 0
    assert second["kl"] > 0
    assert trainer(False).step(answers)["kl"] > 0


def test_a_platform_without_these_bits_is_refused_before_an_engine_is_built(monkeypatch, capsys):
    monkeypatch.setattr("jax.default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="--schedule-invariant: score is not supported on TPU, only on CPU"):
        train_grpo(schedule_invariant=True, held_out=1)
    with pytest.raises(SystemExit):
        consistency.main(["--schedule-invariant"])
    assert "--schedule-invariant: score is not supported on TPU" in capsys.readouterr().err


@needs_native
@pytest.mark.slow
def test_scores_of_shared_blocks_have_the_bits_of_a_schedule_invariant_engine(monkeypatch):
    monkeypatch.setattr(consistency, "ARRANGEMENTS", {"plain": ARRANGEMENTS["plain"]})
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", partial(StepPrograms, compiler_options=OPTIMIZED))
    monkeypatch.setattr(consistency, "_exact", jax.jit(score, compiler_options=SCORE_OPTIONS | OPTIMIZED))
    directory = str(GOLDEN / "zamba2")
    model = load_model(directory, dtype="bfloat16", progress=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 40 + 4 for j in range(40 + i)]} for i in range(4)]
    flags = FLAGS | {"dtype": "bfloat16", "schedule_invariant": True}
    for one in agreements(directory, model, prompts, max_tokens=12, flags=flags):
        assert (one.equal, one.kl) == (2 * 4 * 12, 0)
