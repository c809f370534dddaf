"""A reward rises: rollouts by the engine, steps by the trainer, and the new weights back, in one process."""

import json
import re
from functools import partial

import optax
import pytest

from checkpoints.random import write_random
from mamba_jax.model import parameters
from mamba_jax.programs import StepPrograms
from mamba_jax.train.policy import PolicyTrainer
from serving import LLM
from serving.cli.grpo import Rollouts, improve
from serving.cli.main import run
from tests.support.engines import QUICK_COMPILE
from tests.support.tiny_configs import TRAINABLE

pytestmark = pytest.mark.full


def evenness(answer):
    """The share of even tokens: nothing that a model does by itself, and easy to learn."""
    return sum(token % 2 == 0 for token in answer.token_ids) / len(answer.token_ids)


def test_a_tiny_model_learns_what_is_rewarded(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.engine.build.StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE))
    flags = {"tile_size": 16, "state_block_size": 32, "page_size": 8, "max_num_batched_tokens": 32, "num_slots": 40}
    llm = LLM(write_random(tmp_path, TRAINABLE), max_model_len=32, max_num_seqs=16, num_pages=80, **flags)
    values = {path: leaf.get_value() for path, leaf in parameters(llm.model).items()}
    trainer = PolicyTrainer(llm.model.config, values, optax.adam(3e-2))
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16)
    prompts = [{"prompt_token_ids": [i, 2 * i, 3 * i]} for i in range(1, 7)]
    before = rollouts.mean_reward(prompts, seed=0)
    rounds = improve(llm, trainer, rollouts, prompts, steps=12, prompts_per_step=2)
    assert rollouts.mean_reward(prompts, seed=0) > before + 0.2
    # The engine serves just what the trainer has: nothing lies between their log-probabilities but rounding.
    assert all(abs(one.figures["kl"]) < 1e-7 for one in rounds)
    assert llm.weights_version == "step 12"
    llm.engine.loop.scheduler.check(idle=True)


@pytest.mark.slow
def test_the_demo_model_gets_its_sums_right_more_often(tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    assert run(["train-grpo", "--steps", "40", "--log", str(log), "--output", str(tmp_path / "improved")]) == 0
    before, after = map(float, re.findall(r"(\d\.\d+) (?:before|after)", capfd.readouterr().out))
    assert after > before + 0.1
    assert len([json.loads(line) for line in log.read_text().splitlines()]) == 40
    assert (tmp_path / "improved" / "tokenizer.json").is_file()
    assert run(["generate", "Tom has 5 apples.", "--model", str(tmp_path / "improved"), "--max-tokens", "4"]) == 0
