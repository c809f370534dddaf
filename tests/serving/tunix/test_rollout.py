"""Tunix's own learner and log-probabilities over this engine. Skipped without the extra `tunix`."""

import functools
import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip("tunix.rl", reason="needs the extra tunix")

from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from checkpoints import load_model
from checkpoints.random import write_random
from serving import LLM, RequestError
from serving.tunix import TunixActor, TunixTokenizer
from serving.tunix.rollout import TunixRollout
from tests.support.models.letter_tokens import WORDS, letters
from tests.support.models.tiny_configs import TRAINABLE

pytestmark = pytest.mark.full

FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_num_batched_tokens": 32, "num_slots": 40,
    "max_model_len": 32, "max_num_seqs": 16, "num_pages": 80, "warmup": False,
}  # fmt: skip
CONFIG = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=6, temperature=1.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = write_random(tmp_path_factory.mktemp("model"), TRAINABLE | {"vocab_size": len(WORDS)})
    (path / "tokenizer.json").write_text(letters().to_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "pad_token": "~"}))
    return path


@pytest.fixture
def llm(directory):
    return LLM(str(directory), dtype="float32", **FLAGS)


@pytest.fixture
def actor(directory):
    return TunixActor(load_model(directory, dtype="float32", progress=False))


def rollout_of(llm, **options):
    return TunixRollout(tokenizer=TunixTokenizer(llm.get_tokenizer()), rollout_config=CONFIG, llm=llm, **options)


def tunix_logprobs(actor, rollout, prompts, answers):
    graph, state = nnx.split(actor)
    return common.compute_per_token_logps(
        graph, state, prompt_tokens=prompts, completion_tokens=answers, pad_id=rollout.pad_id(), eos_id=rollout.eos_id()
    )


def padded_answers(rollout, output):
    rows = np.full((len(output.tokens), CONFIG.max_tokens_to_generate), rollout.pad_id(), np.int32)
    for row, tokens in zip(rows, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    return rows


def test_log_probabilities_are_those_that_tunix_computes_from_the_actor(llm, actor):
    rollout = rollout_of(llm)
    output = rollout.generate(["cd", "cd", "xyz", "cd"], CONFIG)
    assert output.left_padded_prompt_tokens.shape == (4, 6)
    assert len({tuple(tokens) for tokens in output.tokens}) == 4, "repeated prompts have the same answer"
    answers = padded_answers(rollout, output)
    expected = np.asarray(tunix_logprobs(actor, rollout, output.left_padded_prompt_tokens, answers))
    scored = np.asarray(rollout.get_per_token_logps(output.left_padded_prompt_tokens, answers))
    for i, (tokens, logprobs) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        np.testing.assert_allclose(logprobs, expected[i, : len(tokens)], atol=2e-5)
        np.testing.assert_allclose(scored[i, : len(tokens)], expected[i, : len(tokens)], atol=2e-5)
        assert not scored[i, len(tokens) :].any()


def test_same_seed_same_answers_and_each_call_draws_others(directory):
    first, again = (rollout_of(LLM(str(directory), **FLAGS), seed=3) for _ in range(2))
    outputs = [first.generate(["cd"] * 3, CONFIG).text for _ in range(2)]
    assert outputs == [again.generate(["cd"] * 3, CONFIG).text for _ in range(2)]
    assert outputs[0] != outputs[1]


def test_learner_raises_the_reward_and_sends_the_weights(llm, actor):
    def evenness(prompts, completions, **_):
        return [sum(ord(letter) % 2 for letter in text) / max(len(text), 1) for text in completions]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = RLCluster(
        actor=actor,
        tokenizer=TunixTokenizer(llm.get_tokenizer()),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
            rollout_engine=functools.partial(TunixRollout, llm=llm),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(3e-2), eval_every_n_steps=100, max_steps=8, mini_batch_size=2
            ),
            rollout_config=CONFIG,
        ),
    )
    rollout, prompts = cluster.rollout, ["cd"] * 8 + ["xyz"] * 8
    before = np.mean(evenness(prompts, rollout.generate(prompts, CONFIG).text))
    # Two iterations per batch use the rollout's log-probabilities of earlier weights.
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0, num_iterations=2), evenness)
    assert learner.should_sync_weights
    learner.train([{"prompts": np.array(["cd", "xyz"])}] * 8)
    output = rollout.generate(prompts, CONFIG)
    assert np.mean(evenness(prompts, output.text)) > before + 0.2
    assert int(llm.weights_version) >= 4
    answers = padded_answers(rollout, output)
    trained = cluster.actor_trainer.model
    expected = tunix_logprobs(trained, rollout, output.left_padded_prompt_tokens, answers)
    scored = rollout.get_per_token_logps(output.left_padded_prompt_tokens, answers)
    # Tunix takes padding that the model sampled for padding.
    shown = np.array([rollout.pad_id() not in each for each in output.tokens])[:, None] & (answers != rollout.pad_id())
    assert shown.sum() > 64
    np.testing.assert_allclose(np.asarray(scored)[shown], np.asarray(expected)[shown], atol=5e-5)


def test_refuses_what_it_cannot_do(llm, actor):
    rollout = rollout_of(llm)
    with pytest.raises(ValueError, match="a prompt has 7 tokens, but max_prompt_length is 6"):
        rollout.generate(["cdefghi"], CONFIG)
    with pytest.raises(ValueError, match=r"options \['images'\] are not supported"):
        rollout.generate(["cd"], CONFIG, images=None)
    with pytest.raises(ValueError, match=r"nnx\.LoRAParam is not supported"):
        rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
    with pytest.raises(RequestError, match="missing"):
        rollout.update_params(nnx.state(actor.model, nnx.Param))
    warm = RolloutConfig(temperature=0.5)
    with pytest.raises(ValueError, match=r"at temperature 0\.5 are not available"):
        TunixRollout(tokenizer=rollout._tokenizer, rollout_config=warm, llm=llm).get_per_token_logps([[3]], [[4]])
