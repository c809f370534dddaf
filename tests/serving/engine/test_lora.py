"""LoRA adapters of requests: each has its own, found in the cache by content. Those of experts equal merged weights."""

import json
import re
import shutil
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import load_config, load_model
from checkpoints.adapters.adapter import CONFIG_FILE, MODULE_PREFIX, WEIGHTS_FILE, read_adapter
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.adapters import targets
from mamba_jax.model import parameters
from serving import LLM, LoRARequest, RequestError, SamplingParams
from tests.support.models import golden_case
from tests.support.models.golden_case import FIXTURES, FLAGS, TO_HUGGING_FACE, Case, chosen_logprobs, said, same
from tests.support.selection import slow

FIXTURE = "lfm2"
pytestmark = pytest.mark.usefixtures("quick_compilation")
GREEDY = SamplingParams(temperature=0, max_tokens=4, logprobs=5)


@pytest.fixture(scope="module")
def prompt():
    return Case(FIXTURE).prompts[4].tolist()


@pytest.fixture(scope="module")
def llm():
    with LLM(str(FIXTURES / FIXTURE), enable_lora=True, max_loras=2, max_lora_rank=4, **FLAGS) as made:
        yield made


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(FIXTURES / FIXTURE / "adapter", tmp_path / "adapter")


def alone(llm, prompt, request, salt):
    """What a request says that finds nothing in the cache."""
    (output,) = llm.generate(prompt, GREEDY, lora_request=request, cache_salt=salt)
    assert output.num_cached_tokens == 0
    return said(output)


def assert_peft_says(output, prompt, directory, atol=TO_HUGGING_FACE):
    """The first token has the log-probability that PEFT gives it, and is the likeliest (unless weights are rounded).
    Returns both."""
    with np.load(directory / "logprobs.npz") as golden:
        assert golden["positions"][-1] == len(prompt) - 1
        expected = dict(zip(golden["ids"][-1].tolist(), golden["logprobs"][-1].tolist(), strict=True))
    token, logprob = said(output)[0][0], said(output)[1][0]
    assert atol > TO_HUGGING_FACE or token == max(expected, key=expected.get)
    assert logprob == pytest.approx(expected[token], abs=atol)
    return token, logprob


def test_an_adapter_says_what_peft_says(llm, prompt, directory):
    (output,) = llm.generate(prompt, GREEDY, lora_request=LoRARequest("peft", 1, str(directory)))
    assert_peft_says(output, prompt, directory)


KINDS = {
    "dora": ("enable_dora", r"has magnitudes .* need the flag enable_dora"),
    "saved": ("lora_tables", r"its own embed and lm_head .* needs the flag lora_tables \([\d,]+ bytes for max_loras 2"),
}


@pytest.mark.full
@pytest.mark.parametrize("devices", [slow(1), 2])
@pytest.mark.parametrize("kind", KINDS)
def test_magnitudes_and_tables_change_the_rows_of_their_adapter_only(llm, prompt, directory, devices, kind):
    folder, (flag, message) = FIXTURES / FIXTURE / kind, KINDS[kind]
    # Refused before any number is read.
    with mock.patch.object(SafetensorsFile, "copy", None), pytest.raises(RequestError, match=message):
        llm.load_lora_adapter(kind, str(folder))
    lora, own = LoRARequest("lora", 1, str(directory)), LoRARequest(kind, 2, str(folder))
    expected = [alone(llm, prompt, each, f"{kind} {devices}") for each in (None, lora)]
    flags = {"enable_lora": True, flag: True, "max_lora_rank": 4, "tensor_parallel_size": devices}
    with LLM(str(FIXTURES / FIXTURE), **FLAGS | flags) as other:
        *others, changed = other.generate([prompt] * 3, GREEDY, lora_request=[None, lora, own])
        assert all(map(same, map(said, others), expected))
        token, logprob = assert_peft_says(changed, prompt, folder)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (echoed,) = other.generate([*prompt, token], scored, lora_request=own)
        assert echoed.prompt_logprobs[-1][token].logprob == pytest.approx(logprob, abs=TO_HUGGING_FACE)
        if kind == "dora":
            with pytest.raises(RequestError, match="enable_dora"):
                other.update_weights(str(FIXTURES / FIXTURE))


def test_a_removed_adapter_leaves_zeros(llm, prompt, directory):
    before = alone(llm, prompt, None, "base before")
    llm.load_lora_adapter("usual", str(directory))
    llm.unload_lora_adapter("usual")
    with pytest.raises(RequestError, match="adapter 'usual' is not loaded"):
        llm.unload_lora_adapter("usual")
    for name in list(llm.engine.adapters.loaded):
        llm.unload_lora_adapter(name)
    assert not any(np.asarray(array).any() for array in llm.engine.loop.programs.adapters.arrays)
    assert same(alone(llm, prompt, None, "base after"), before)


@pytest.mark.usefixtures("few_tokens_are_divided")
@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}, {"host_cache_gib": 0.01, "num_slots": 10}],
    ids=["two devices", "two members", "tiers"],
)
def test_adapters_on_two_devices_and_from_tiers(llm, prompt, directory, flags):
    request = LoRARequest("divided", 1, str(directory))
    expected = [alone(llm, prompt, each, f"expected {flags}") for each in (request, None)]
    with LLM(str(FIXTURES / FIXTURE), enable_lora=True, max_lora_rank=4, **FLAGS | flags) as other:
        for _ in range(2):
            found = other.generate([prompt] * 2, GREEDY, lora_request=[request, None])
            assert all(map(same, map(said, found), expected))
            for i in range(4):  # evicts
                other.generate([(i + token) % 100 for token in prompt], GREEDY, lora_request=request)


@pytest.mark.full
def test_quantized_weights_have_adapters_too(prompt, directory):
    request = LoRARequest("wide", 1, str(directory))
    with LLM(str(FIXTURES / FIXTURE), enable_lora=True, max_lora_rank=4, quantization="int8", **FLAGS) as narrow:
        found = narrow.generate(prompt, GREEDY, lora_request=request)[0]
        plain = narrow.generate(prompt, GREEDY)[0]
    assert_peft_says(found, prompt, directory, atol=0.1)
    assert not same(said(found), said(plain))


def test_a_removed_adapter_is_read_again_with_its_old_content_only(llm, prompt, directory, tmp_path):
    llm.load_lora_adapter("first", str(directory))
    for name in ("second", "third"):  # they take both entries
        llm.load_lora_adapter(name, str(directory))
    request = LoRARequest("first", 1, str(directory))
    assert "first" not in llm.engine.adapters.loaded
    llm.generate(prompt, GREEDY, lora_request=request)
    for name in ("second", "third"):
        llm.load_lora_adapter(name, str(directory))
    config = directory / CONFIG_FILE
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 17}))
    with pytest.raises(RequestError, match="have changed since it was loaded; load the adapter again"):
        llm.generate(prompt, GREEDY, lora_request=request)
    llm.load_lora_adapter("first", str(directory))
    (output,) = llm.generate(prompt, GREEDY, lora_request=request)
    assert output.num_cached_tokens == 0  # what the old content computed is not found


OF_EXPERTS = FLAGS | {"max_num_batched_tokens": 256, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
GATED, PLAIN = "qwen35-moe", "nemotronh-moe"
"""The experts of the first have a gate projection."""


def experts_of(fixture):
    """The modules of routed experts, by the names of their tensors in the checkpoint, and the tensors' shapes."""
    tensors = load_file(FIXTURES / fixture / "model.safetensors")
    pattern = r"(?!.*mtp)(.*\.experts\.\d+\.\w+)\.weight"
    return {match[1]: value.shape for name, value in tensors.items() if (match := re.fullmatch(pattern, name))}


def write_adapter(folder, fixture, seed, *, rank, every=1, alpha=6):
    """Writes a random adapter of every n-th module. Returns what it adds to each tensor of the checkpoint."""
    rng, tensors, changes = np.random.default_rng(seed), {}, {}
    for module, (outputs, inputs) in list(experts_of(fixture).items())[::every]:
        a = (rng.normal(size=(rank, inputs)) / np.sqrt(inputs)).astype(np.float32)
        b = (0.4 * rng.normal(size=(outputs, rank))).astype(np.float32)
        tensors[f"{MODULE_PREFIX}{module}.lora_A.weight"], tensors[f"{MODULE_PREFIX}{module}.lora_B.weight"] = a, b
        changes[f"{module}.weight"] = alpha / rank * (b @ a)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return changes


def merged(folder, fixture, changes):
    """A model from a checkpoint to whose tensors the changes were added."""
    shutil.copytree(FIXTURES / fixture, folder, ignore=shutil.ignore_patterns("adapter"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, change in changes.items():
        tensors[name] = (tensors[name].astype(np.float32) + change).astype(np.float32)
    save_file(tensors, path)
    return load_model(folder, dtype="float32", progress=False)


def log_probs(model, prompt, tokens):
    """Log-probabilities of `tokens` after the prompt, by the whole sequence at once."""
    whole = golden_case.log_probs(model, [*prompt, *tokens])
    return whole[np.arange(len(tokens)) + len(prompt) - 1, tokens]


@pytest.mark.full
@pytest.mark.parametrize(
    ("fixture", "devices"),
    [
        ("minimax", 2), (PLAIN, 1), slow("nemotronh-latent", 2), slow("lfm2-moe", 2),
        *(slow(fixture, 1) for fixture in (GATED, "nemotronh-latent", "lfm2-moe", "kimi")),
    ],
)  # fmt: skip
def test_a_mixed_batch_equals_merged_checkpoints(fixture, devices, tmp_path):
    """Requests with two adapters and without one, together and one at a time. Of two devices, each has the matrices of
    its own experts. Those of minimax, which have a gate projection, are 5: a device has a piece of each."""
    changes = {
        "first": write_adapter(tmp_path / "first", fixture, 1, rank=3),
        "second": write_adapter(tmp_path / "second", fixture, 2, rank=2, every=3),
    }
    models = {name: merged(tmp_path / f"merged {name}", fixture, change) for name, change in changes.items()}
    models["base"] = merged(tmp_path / "merged base", fixture, {})
    prompt = Case(fixture).prompts[4].tolist()
    names = ["first", "base", "second", "first"]
    requests = [None if name == "base" else LoRARequest(name, 0, str(tmp_path / name)) for name in names]
    prompts = [prompt, prompt, prompt, prompt[:9]]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    with LLM(str(FIXTURES / fixture), lora_experts=True, tensor_parallel_size=devices, **OF_EXPERTS) as llm:
        together = llm.generate(prompts, params, lora_request=requests)
        alone = [
            llm.generate(each, params, lora_request=request, cache_salt="alone")[0]
            for each, request in zip(prompts, requests, strict=True)
        ]
    found = []
    for name, each, output, one in zip(names, prompts, together, alone, strict=True):
        choice, again = output.outputs[0], one.outputs[0]
        assert choice.token_ids == again.token_ids
        told = chosen_logprobs(choice)
        np.testing.assert_allclose(told, chosen_logprobs(again), atol=TO_HUGGING_FACE)
        np.testing.assert_allclose(told, log_probs(models[name], each, list(choice.token_ids)), atol=TO_HUGGING_FACE)
        found.append(log_probs(models[name], prompt, [1, 2, 3]))
    assert min(np.abs(found[0] - found[1]).max(), np.abs(found[2] - found[1]).max()) > 10 * TO_HUGGING_FACE


@pytest.mark.parametrize("fixture", [GATED, PLAIN])
def test_each_experts_matrices_are_read_into_its_place(fixture, tmp_path):
    """B A of each weight of all experts is what the modules of the file add; other experts have zeros."""
    changes = write_adapter(tmp_path / "adapter", fixture, 1, rank=3, every=3)
    adapter = read_adapter(tmp_path / "adapter", load_config(FIXTURES / fixture))
    assert adapter.rank == 3
    plain, changed = (merged(tmp_path / f"{len(each)}", fixture, each) for each in ({}, changes))
    for path, (a, b) in adapter.layers.items():
        before, after = (np.asarray(_weight(model, path), np.float32) for model in (plain, changed))
        np.testing.assert_allclose((b @ a).reshape(before.shape), after - before, atol=1e-6)
    of_experts = [path for path, target in targets(plain, experts=True).items() if target.lead]
    moved = [path for path in of_experts if (_weight(plain, path) != _weight(changed, path)).any()]
    assert sorted(adapter.layers) == sorted(moved) != []


def _weight(model, path):
    return parameters(model)[path][...]


def test_an_adapter_of_experts_needs_the_flag(tmp_path):
    write_adapter(tmp_path / "adapter", PLAIN, 1, rank=3)
    with (
        LLM(str(FIXTURES / PLAIN), **OF_EXPERTS, warmup=False) as llm,
        pytest.raises(RequestError, match=r"changes routed experts \(.*experts\.down\), which needs the flag lora_exp"),
    ):
        llm.load_lora_adapter("tenant", str(tmp_path / "adapter"))
