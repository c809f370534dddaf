"""`train-lora` and `train-s0` on the demo model: the held-out loss falls, and the engine agrees with training."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import mamba_jax
from checkpoints.adapters.adapter import read_adapter
from checkpoints.adapters.initial_state import read_initial_state
from checkpoints.resolve import DEMO_DIRECTORY
from mamba_jax.layout import SequenceLayout
from mamba_jax.train.additions import attach, new_adapter
from serving import LLM, LoRARequest, SamplingParams
from serving.cli.main import run
from tests.support.selection import slow

SMALL = ["--steps", "20", "--batch-size", "4", "--sequence-length", "128"]
PROMPT = "A bottle of tea is 16 ounces of tea."


def trained(command, output, capfd, *more):
    """Runs a command. Returns the held-out loss before and after."""
    data = str(DEMO_DIRECTORY / "heldout_problems.jsonl")
    assert run([command, "--model", "demo", "--data", data, "--output", str(output), *SMALL, *more]) == 0
    found = re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", capfd.readouterr().err)
    return float(found[1]), float(found[2])


def logprobs(model, tokens, layout):
    hidden, _ = model.run(tokens, layout, None)
    logits = np.asarray(model.logits(hidden), np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


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
    assert_served(
        tmp_path / "s0", model, lambda length: attach(model, SequenceLayout.of(1, length), added), max_initial_states=1
    )


def test_a_new_adapter_and_targets(tmp_path, capfd):
    from checkpoints.adapters.adapter_export import target_layers

    config = mamba_jax.load("demo").config
    layers = target_layers(config, ("in_proj",))
    values = new_adapter(config, layers, rank=2, alpha=4.0, seed=0)
    modules = set(layers.values())
    assert len(layers) == 3 * len(modules)
    # Parts of one module share A, as in PEFT.
    assert sum(path.endswith(".a") for path in values) == len(modules)
    assert values["lora_scale"] == 2.0
    line = ["train-lora", "--model", "demo", "--data", str(DEMO_DIRECTORY / "heldout_text.jsonl")]
    assert run([*line, "--output", str(tmp_path / "x"), "--target-modules", "in_proj,none"]) == 2
    assert "target module 'none' is no dense layer of the model; known are" in capfd.readouterr().err
    (tmp_path / "x").mkdir(exist_ok=True)
    (tmp_path / "x/file").write_text("")
    assert run([*line, "--output", str(tmp_path / "x")]) == 2
    assert "already exists and is not empty" in capfd.readouterr().err
