"""GRPO in one process: the engine samples answers, the trainer takes a step, and the engine gets the new weights."""

import json
import re
from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from checkpoints.adapters.adapter_export import target_layers
from checkpoints.random import write_random
from mamba_jax.model import parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.train.additions import LORA_SCALE, is_trained, new_adapter
from mamba_jax.train.loss import build
from mamba_jax.train.policy import PolicyTrainer
from mamba_jax.train.score import sequence_logprobs
from serving import LLM, LoRARequest
from serving.cli.main import run
from serving.cli.training.rollouts import Rollouts, ServedAdapter, improve
from tests.support.engines.engines import QUICK_COMPILE
from tests.support.models.tiny_configs import TRAINABLE

pytestmark = pytest.mark.full


def evenness(answer):
    """The share of even tokens: nothing that a model does by itself, and easy to learn."""
    return sum(token % 2 == 0 for token in answer.token_ids) / len(answer.token_ids)


FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_num_batched_tokens": 32, "num_slots": 40,
    "max_model_len": 32, "max_num_seqs": 16, "num_pages": 80,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    monkeypatch.setattr(
        "serving.engine.assembly.build.StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE)
    )


def test_a_tiny_model_learns_what_is_rewarded(tmp_path):
    llm = LLM(write_random(tmp_path, TRAINABLE), **FLAGS)
    values = {path: leaf.get_value() for path, leaf in parameters(llm.model).items()}
    trainer = PolicyTrainer(llm.model.config, values, optax.adam(3e-2))
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16)
    prompts = [{"prompt_token_ids": [i, 2 * i, 3 * i]} for i in range(1, 7)]
    before = rollouts.mean_reward(prompts, seed=0)

    def update(values, version):
        llm.update_weights(values, version=version)

    rounds = improve(update, trainer, rollouts, prompts, steps=12, prompts_per_step=2)
    assert rollouts.mean_reward(prompts, seed=0) > before + 0.2
    # The engine has the trainer's weights, so log-probabilities differ only by rounding.
    assert all(abs(one.figures["kl"]) < 1e-7 for one in rounds)
    assert llm.weights_version == "step 12"
    llm.engine.loop.scheduler.check(idle=True)


def test_an_adapter_is_trained_while_the_engine_serves_it(tmp_path):
    path = write_random(tmp_path / "model", TRAINABLE)
    llm = LLM(path, enable_lora=True, max_loras=1, max_lora_rank=2, **FLAGS)
    config = llm.model.config
    base = {name: np.array(leaf.get_value()) for name, leaf in parameters(llm.model).items()}
    values = {name: leaf.get_value() for name, leaf in parameters(llm.model).items()}
    values |= new_adapter(config, target_layers(config), rank=2, alpha=4.0, seed=0)
    trainer = PolicyTrainer(config, values, optax.adam(3e-2), trained=is_trained)
    served = ServedAdapter(llm, tmp_path / "served", alpha=4.0, base=str(path))
    served.update(trainer.values)
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16, lora_request=served.lora_request)
    prompts = [{"prompt_token_ids": [i, 2 * i, 3 * i]} for i in range(1, 7)]
    # The second call finds all prompts in the cache, and compiles the programs for that.
    before = [rollouts.sample(prompts, seed=0)[0] for _ in range(2)][1]
    compilations, digests = llm.compilations, [llm.engine.adapters.loaded["policy"]]

    def update(values, version):
        served.update(values)
        digests.append(llm.engine.adapters.loaded["policy"])

    # The prompts are cached before each update. States of an earlier adapter would change the log-probabilities.
    rounds = improve(update, trainer, rollouts, prompts, steps=2, prompts_per_step=6)
    after, _ = rollouts.sample(prompts, seed=0)
    assert all(abs(one.figures["kl"]) < 1e-7 for one in rounds)
    assert llm.compilations == compilations
    assert len(set(digests)) == 3
    for name, leaf in parameters(llm.model).items():
        np.testing.assert_array_equal(leaf.get_value(), base[name], err_msg=name)
        np.testing.assert_array_equal(trainer.values[name], base[name], err_msg=name)
    assert trainer.values[LORA_SCALE] == 2.0

    def trained_logprobs(answers):
        added = {name: value for name, value in trainer.values.items() if name not in base}
        model = build(config, {name: jnp.asarray(value) for name, value in base.items()}, np.float32)
        found = sequence_logprobs(model, answers.tokens, answers.lengths, added)
        return np.asarray(found)[answers.answered]

    np.testing.assert_allclose(after.logprobs[after.answered], trained_logprobs(after), atol=1e-4)
    assert np.abs(before.logprobs[before.answered] - trained_logprobs(before)).max() > 1e-2

    served.write(tmp_path / "exported", trainer.values)
    exported = LoRARequest("exported", 2, str(tmp_path / "exported"))
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16, lora_request=exported)
    np.testing.assert_array_equal(rollouts.sample(prompts, seed=0)[0].logprobs, after.logprobs)
    assert llm.engine.adapters.loaded == {"exported": digests[-1]}
    llm.engine.loop.scheduler.check(idle=True)


def test_values_that_lora_cannot_use_are_refused_before_the_engine_starts(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("serving.engine.llm.LLM", None)
    assert run(["train-grpo", "--lora", "--target-modules", "query"]) == 2
    assert "target module 'query' is no dense layer of the model" in capfd.readouterr().err
    assert run(["train-grpo", "--lora", "--alpha", "0"]) == 2
    assert "alpha above 0" in capfd.readouterr().err


@pytest.mark.slow
def test_the_demo_model_gets_its_sums_right_more_often(tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    assert run(["train-grpo", "--steps", "40", "--log", str(log), "--output", str(tmp_path / "improved")]) == 0
    before, after = map(float, re.findall(r"(\d\.\d+) (?:before|after)", capfd.readouterr().out))
    assert after > before + 0.1
    assert len([json.loads(line) for line in log.read_text().splitlines()]) == 40
    assert (tmp_path / "improved" / "tokenizer.json").is_file()
    assert run(["generate", "Tom has 5 apples.", "--model", str(tmp_path / "improved"), "--max-tokens", "4"]) == 0
