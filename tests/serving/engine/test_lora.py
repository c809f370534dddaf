"""LoRA adapters of requests: each has its own, and cached states are found by the adapter's content, not its name."""

import json
import shutil
from unittest import mock

import numpy as np
import pytest

from checkpoints.adapters.adapter import CONFIG_FILE
from checkpoints.tensors.safetensors_file import SafetensorsFile
from serving import LLM, LoRARequest, RequestError, SamplingParams
from tests.support.models.golden_case import FIXTURES, FLAGS, TO_HUGGING_FACE, Case, said, same
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


def strengthen(directory, alpha):
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))


def alone(llm, prompt, request, salt):
    """What a request says that finds nothing in the cache."""
    (output,) = llm.generate(prompt, GREEDY, lora_request=request, cache_salt=salt)
    assert output.num_cached_tokens == 0
    return said(output)


def next_token(output, prompt, directory):
    """The first token, its log-probability, and those that PEFT gives for the likeliest tokens."""
    with np.load(directory / "logprobs.npz") as golden:
        assert golden["positions"][-1] == len(prompt) - 1
        expected = dict(zip(golden["ids"][-1].tolist(), golden["logprobs"][-1].tolist(), strict=True))
    return said(output)[0][0], said(output)[1][0], expected


def test_an_adapter_says_what_peft_says(llm, prompt, directory):
    (output,) = llm.generate(prompt, GREEDY, lora_request=LoRARequest("peft", 1, str(directory)))
    token, logprob, expected = next_token(output, prompt, directory)
    assert token == max(expected, key=expected.get)
    assert logprob == pytest.approx(expected[token], abs=TO_HUGGING_FACE)


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
        token, logprob, golden = next_token(changed, prompt, folder)
        assert token == max(golden, key=golden.get)
        assert logprob == pytest.approx(golden[token], abs=TO_HUGGING_FACE)
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (echoed,) = other.generate([*prompt, token], scored, lora_request=own)
        assert echoed.prompt_logprobs[-1][token].logprob == pytest.approx(logprob, abs=TO_HUGGING_FACE)
        if kind == "dora":
            with pytest.raises(RequestError, match="enable_dora"):
                other.update_weights(str(FIXTURES / FIXTURE))


def test_no_entry_is_written_while_a_request_uses_it(llm, prompt, directory):
    requests = [LoRARequest(name, i, str(directory)) for i, name in enumerate("xyz")]
    with pytest.raises(RequestError, match="unfinished requests use all 2 loaded adapters"):
        llm.generate([prompt] * 3, GREEDY, lora_request=requests)
    assert not llm.engine.num_unfinished
    llm.generate(prompt, GREEDY, lora_request=requests[2])
    llm.unload_lora_adapter("z")
    with pytest.raises(RequestError, match="adapter 'z' is not loaded"):
        llm.unload_lora_adapter("z")


def test_an_adapter_with_an_overflow_is_refused_and_a_removed_one_leaves_zeros(llm, prompt, directory):
    before = alone(llm, prompt, None, "base before")
    strengthen(directory, 1e40)
    with pytest.raises(RequestError, match="lora_alpha is 1e"):
        llm.load_lora_adapter("large", str(directory))
    strengthen(directory, 5)
    llm.load_lora_adapter("usual", str(directory))
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
    token, logprob, expected = next_token(found, prompt, directory)
    assert logprob == pytest.approx(expected[token], abs=0.1)
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
    strengthen(directory, 17)
    with pytest.raises(RequestError, match="have changed since it was loaded; load the adapter again"):
        llm.generate(prompt, GREEDY, lora_request=request)
    llm.load_lora_adapter("first", str(directory))
    llm.generate(prompt, GREEDY, lora_request=request)
