"""`train --model`, `train-lora`, `train-s0` and `train-grpo`: what is trained is better, is saved in the form of the
checkpoint, and the engine agrees with training.
"""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mamba_jax
from checkpoints.adapters.adapter import read_adapter
from checkpoints.adapters.adapter_export import target_layers
from checkpoints.adapters.initial_state import read_initial_state
from checkpoints.random import write_random
from checkpoints.resolve import DEMO_DIRECTORY
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import parameters
from mamba_jax.train.additions import LORA_SCALE, attach, is_trained, new_adapter
from mamba_jax.train.loss import build
from mamba_jax.train.policy import PolicyTrainer
from mamba_jax.train.score import sequence_logprobs
from serving import LLM, LoRARequest, SamplingParams
from serving.cli.main import run
from serving.cli.training.rollouts import Rollouts, ServedAdapter, improve
from serving.config import EngineConfig
from tests.serving.cli.test_cli import read_lines, write_lines
from tests.support.engines.step_programs import few_programs, shared_programs
from tests.support.models.tiny_configs import TRAINABLE
from tests.support.selection import slow

SMALL = ["--steps", "20", "--batch-size", "4", "--sequence-length", "128"]
PROMPT = "A bottle of tea is 16 ounces of tea."


def trained(command, output, capfd, *more):
    """Runs a command. Returns the held-out loss before and after."""
    data = str(DEMO_DIRECTORY / "heldout_problems.jsonl")
    assert run([command, "--model", "demo", "--data", data, "--output", str(output), *SMALL, *more]) == 0
    found = re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", capfd.readouterr().err)
    return float(found[1]), float(found[2])


@pytest.mark.full
def test_a_checkpoint_is_fine_tuned_and_saved_in_its_own_form(tmp_path):
    base, tuned, corpus = tmp_path / "base", tmp_path / "run", tmp_path / "text.jsonl"
    tokenizer = (DEMO_DIRECTORY / "tokenizer.json").read_text()
    write_random(base, TRAINABLE | {"vocab_size": 4096}, dtype="bfloat16", tokenizer=tokenizer)
    write_lines(corpus, *({"id": str(i), "text": "one two three four five six seven " * 8} for i in range(16)))
    settings = ["steps=6", "batch_size=8", "sequence_length=16", "log_every=3", "validate_every=2"]
    settings += ["optimizer.learning_rate=0.01", "optimizer.warmup_steps=0", "data.held_out=0.25"]
    changes = [part for one in settings for part in ("--set", one)]
    assert run(["train", "--model", str(base), "--corpus", str(corpus), "--output", str(tuned), *changes]) == 0
    records = read_lines(tuned / "log.jsonl")
    assert [record["step"] for record in records] == [2, 3, 4, 6]
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert len(losses) == 3
    assert losses[-1] < 0.8 * losses[0]
    config = json.loads((tuned / "model/config.json").read_text())
    assert config == json.loads((base / "config.json").read_text())
    assert (tuned / "model/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before, after = (
        {path: leaf.get_value() for path, leaf in mamba_jax.parameters(mamba_jax.load(str(ref))).items()}
        for ref in (base, tuned / "model")
    )
    unchanged = {path for path in before if (np.asarray(before[path]) == np.asarray(after[path])).all()}
    assert any(path.startswith("mtp.") for path in unchanged)
    assert all(path.startswith("mtp.") for path in unchanged), unchanged


def logprobs(model, tokens, layout):
    @jax.jit
    def run(model, tokens):
        hidden, _ = model.run(tokens, layout, None)
        return jax.nn.log_softmax(model.logits(hidden))

    return np.asarray(run(model, tokens))


def assert_served(adapter, model, layout_of, **flags):
    """The engine's log-probabilities with the adapter are those of the model with `layout_of(length)`."""
    llm = LLM("demo", dtype="float32", max_model_len=64, max_num_seqs=2, warmup=False, **flags)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    request = LoRARequest("tenant", 1, str(adapter))
    (own,), (base,) = (llm.generate(PROMPT, params, lora_request=one, use_tqdm=False) for one in (request, None))
    choice = own.outputs[0]
    assert choice.token_ids != base.outputs[0].token_ids
    tokens = [*own.prompt_token_ids, *choice.token_ids]
    expected = logprobs(model, jnp.array(tokens), layout_of(len(tokens)))[len(own.prompt_token_ids) - 1 : -1]
    said = [choice.logprobs[at][token].logprob for at, token in enumerate(choice.token_ids)]
    assert np.allclose(said, [row[token] for row, token in zip(expected, choice.token_ids, strict=True)], atol=2e-3)
    assert expected.argmax(-1).tolist() == list(choice.token_ids)


@pytest.mark.full
def test_an_adapter_is_trained_and_served(tmp_path, capfd):
    before, after = trained("train-lora", tmp_path / "lora", capfd, "--rank", "4", "--rematerialize")
    assert after < before - 0.15
    model = mamba_jax.load("demo", dtype="float32")
    adapter = read_adapter(tmp_path / "lora", model.config)
    assert adapter.rank == 4
    for path, layer in mamba_jax.adapters.adaptable_layers(model).items():
        a, b = adapter.layers[path]
        change = (b.astype(np.float64) @ a).reshape(layer.weight.shape)
        layer.weight[...] = layer.weight[...] + change.astype(np.float32)
    assert_served(tmp_path / "lora", model, lambda length: SequenceLayout.of(1, length), enable_lora=True)


@pytest.mark.full
@pytest.mark.parametrize("windows", [slow(()), ("--windows",)], ids=["states", "states and windows"])
def test_initial_states_are_trained_and_served(windows, tmp_path, capfd):
    before, after = trained("train-s0", tmp_path / "s0", capfd, *windows)
    assert after < before - 0.15
    model = mamba_jax.load("demo", dtype="float32")
    states = read_initial_state(tmp_path / "s0", model.config)
    assert all(set(layer) == ({"state", "window"} if windows else {"state"}) for layer in states.layers.values())
    slots = zip(sorted(states.layers), states.slot_arrays(model.config), strict=True)
    added = {f"initial_state.{i}.{name}": jnp.asarray(value) for i, slot in slots for name, value in slot.items()}
    assert_served(tmp_path / "s0", model, lambda n: attach(model, SequenceLayout.of(1, n), added), max_initial_states=1)


def test_a_new_adapter():
    config = mamba_jax.load("demo").config
    layers = target_layers(config, "in_proj")
    values = new_adapter(config, layers, rank=2, alpha=4.0, seed=0)
    modules = set(layers.values())
    assert len(layers) == 3 * len(modules)
    # Parts of one module share A, as in PEFT.
    assert sum(path.endswith(".a") for path in values) == len(modules)
    assert values["lora_scale"] == 2.0


def evenness(answer):
    """The share of even tokens: nothing that a model does by itself, and easy to learn."""
    return sum(token % 2 == 0 for token in answer.token_ids) / len(answer.token_ids)


FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 8, "max_num_batched_tokens": 32, "num_slots": 40,
    "max_model_len": 32, "max_num_seqs": 16, "num_pages": 80,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick_compilation():
    with few_programs(shared_programs):
        yield


def test_a_schedule_invariant_trainer_refuses_an_engine_on_several_devices():
    llm = SimpleNamespace(config=EngineConfig(tensor_parallel_size=2, context_parallel_size=2))
    rollouts = Rollouts(llm, evenness, samples=1, max_tokens=1, length=2)
    with pytest.raises(ValueError, match="the engine runs on 4 devices: use one"):
        improve(print, SimpleNamespace(schedule_invariant=True), rollouts, [], steps=1, prompts_per_step=1)


@pytest.mark.full
def test_a_tiny_model_learns_what_is_rewarded(tmp_path):
    llm = LLM(write_random(tmp_path, TRAINABLE), **FLAGS)
    values = {path: leaf.get_value() for path, leaf in parameters(llm.model).items()}
    trainer = PolicyTrainer(llm.model.config, values, optax.adam(3e-2))
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16)
    prompts = [{"prompt_token_ids": [i, 2 * i, 3 * i]} for i in range(1, 7)]
    _, before = rollouts.sample(prompts, seed=0)

    update = lambda values, version: llm.update_weights(values, version=version)  # noqa: E731
    rounds = improve(update, trainer, rollouts, prompts, steps=12, prompts_per_step=2)
    assert rollouts.sample(prompts, seed=0)[1] > before + 0.2
    # The engine has the trainer's weights, so log-probabilities differ only by rounding.
    assert all(abs(one.figures["kl"]) < 1e-7 for one in rounds)
    assert llm.weights_version == "step 12"
    llm.engine.loop.scheduler.check(idle=True)


@pytest.mark.full
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
        found = jax.jit(sequence_logprobs)(model, answers.tokens, answers.lengths, added)
        return np.asarray(found)[answers.answered]

    np.testing.assert_allclose(after.logprobs[after.answered], trained_logprobs(after), atol=1e-4)
    assert np.abs(before.logprobs[before.answered] - trained_logprobs(before)).max() > 1e-2

    served.write(tmp_path / "exported", trainer.values)
    exported = LoRARequest("exported", 2, str(tmp_path / "exported"))
    rollouts = Rollouts(llm, evenness, samples=8, max_tokens=8, length=16, lora_request=exported)
    np.testing.assert_array_equal(rollouts.sample(prompts, seed=0)[0].logprobs, after.logprobs)
    assert llm.engine.adapters.loaded == {"exported": digests[-1]}
    llm.engine.loop.scheduler.check(idle=True)


@pytest.mark.slow
def test_the_demo_model_gets_its_sums_right_more_often(tmp_path, capfd):
    log = tmp_path / "log.jsonl"
    assert run(["train-grpo", "--steps", "40", "--log", str(log), "--output", str(tmp_path / "improved")]) == 0
    before, after = map(float, re.findall(r"(\d\.\d+) (?:before|after)", capfd.readouterr().out))
    assert after > before + 0.1
    assert len(read_lines(log)) == 40
    assert (tmp_path / "improved" / "tokenizer.json").is_file()
    assert run(["generate", "Tom has 5 apples.", "--model", str(tmp_path / "improved"), "--max-tokens", "4"]) == 0
