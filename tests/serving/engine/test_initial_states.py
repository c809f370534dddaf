"""Learned initial states: a request whose prefix is not cached starts from the state of its adapter, not from zeros."""

import dataclasses
import functools
import shutil
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load_config
from checkpoints.adapters.initial_state import read_initial_state, write_initial_state
from serving import LLM, LoRARequest, RequestError, SamplingParams
from tests.support.engines.prompt_stepper import PromptStepper
from tests.support.models import golden_case
from tests.support.models.golden_case import FIXTURES, TO_HUGGING_FACE, Case, said, same
from tests.support.models.random_models import random_layers

FIXTURE = "nemotronh-moe"
pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = golden_case.FLAGS | {"debug_state": True}
COUNT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=5)
PATTERN = [3, 14, 15, 92, 65, 35]
PROMPT = [*PATTERN * 7, 9, *PATTERN[:3]]
"""Repeats itself, so that n-grams give drafts."""


def layers_of(seed, fixture=FIXTURE, scale=0.5):
    return random_layers(load_config(FIXTURES / fixture), seed, scale)


def write(directory, layers, fixture=FIXTURE):
    write_initial_state(directory, layers, load_config(FIXTURES / fixture))
    return LoRARequest(directory.name, 1, str(directory))


@functools.cache
def expected(seed, prompt=tuple(PROMPT)):
    """What follows a prompt: one token at a time, from the state of this seed (None: from zeros)."""
    stepper = PromptStepper(Case(FIXTURE).model, [np.array(prompt)])
    stepper.reset()
    if seed is not None:
        stepper.slot[0] = slot = stepper.store.num_slots - 1
        for arrays, values in zip(stepper.store.slots, slot_arrays(seed), strict=True):
            for name, value in values.items():
                arrays[name] = arrays[name].at[slot].set(value)
        stepper.store = dataclasses.replace(stepper.store, hidden=stepper.store.hidden.at[slot].set(0))
    tokens, logprobs = [], []
    for step in range(len(prompt) + COUNT - 1):
        output = stepper.decode([0])
        if step >= len(prompt) - 1:
            tokens.append(int(output.tokens[0, 0]))
            logprobs.append(float(output.logprobs[0, 0]))
    return tokens, np.array(logprobs)


def slot_arrays(seed):
    config = load_config(FIXTURES / FIXTURE)
    with tempfile.TemporaryDirectory() as folder:
        write_initial_state(folder, layers_of(seed), config)
        state = read_initial_state(folder, config)
    return [{name: jnp.asarray(value) for name, value in arrays.items()} for arrays in state.slot_arrays(config)]


@pytest.fixture(
    scope="module", params=[{}, pytest.param({"context_parallel_size": 2}, marks=pytest.mark.full)], ids=str
)
def llm(request):
    with LLM(str(FIXTURES / FIXTURE), max_initial_states=2, **FLAGS, **request.param) as made:
        yield made


@pytest.fixture
def tenants(tmp_path):
    return [write(tmp_path / f"tenant-{seed}", layers_of(seed)) for seed in range(3)]


def test_rows_of_a_batch_start_from_different_states(llm, tenants):
    requests = [tenants[0], None, tenants[1], None]
    for salt in ("cold", "cold", "other"):  # the second time, prefixes are found
        together = llm.generate([PROMPT] * 4, GREEDY, lora_request=requests, cache_salt=salt)
        for output, seed in zip(together, (0, None, 1, None), strict=True):
            assert same(said(output), expected(seed))
    assert not same(expected(0), expected(1))
    assert not same(expected(0), expected(None))


@pytest.mark.full
def test_a_lost_store_gets_its_initial_states_again(llm, tenants):
    def fail(plan):
        llm.engine.loop.fault = None
        raise RuntimeError("RESOURCE_EXHAUSTED: as a device reports it")

    failures = llm.engine.loop.stats.failures
    llm.engine.loop.fault = fail
    (output,) = llm.generate(PROMPT, GREEDY, lora_request=tenants[0], cache_salt="lost")
    assert llm.engine.loop.stats.failures == failures + 1
    assert same(said(output), expected(0))
    llm.sleep()
    llm.load_lora_adapter(tenants[1].lora_name, tenants[1].lora_path)
    assert llm.engine.loop.store is None, "loading an adapter does not allocate the store of a sleeping engine"
    llm.wake_up()
    outputs = llm.generate([PROMPT] * 2, GREEDY, lora_request=tenants[:2], cache_salt="slept")
    assert same(said(outputs[0]), expected(0))
    assert same(said(outputs[1]), expected(1))


@pytest.mark.full
def test_it_continues_a_text_as_hugging_face_does(tmp_path):
    """With recurrent layers only, the state after a text stands for the text: the rest gives the golden values."""
    fixture, at = "mamba2", 70
    prompt = Case(fixture).prompts[5].tolist()
    with LLM(str(FIXTURES / fixture), max_initial_states=1, **FLAGS) as llm:
        llm.generate(prompt[:at], SamplingParams(temperature=0, max_tokens=1))
        cache = llm.engine.loop.scheduler.cache
        entry = cache.index.find(prompt[:at], cache.scope(None)).entry
        assert entry.position == at
        layers = {}
        for index, arrays in enumerate(llm.engine.loop.store.slots):
            own = {name: np.asarray(value[entry.slot]) for name, value in arrays.items()}
            layers[index] = {"state": own["ssm"], "window": np.concatenate([own["conv_x"], own["conv_bc"]], axis=1)}
        tenant = write(tmp_path / "text", layers, fixture)
        (output,) = llm.generate(prompt[at:], GREEDY, lora_request=tenant)
        assert output.num_cached_tokens == 0
    positions, ids, logprobs = Case(fixture).expected(5)
    assert positions[-1] == len(prompt) - 1
    golden = dict(zip(ids[-1].tolist(), logprobs[-1].tolist(), strict=True))
    token, table = output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]
    assert token == max(golden, key=golden.get)
    assert table[token].logprob == pytest.approx(golden[token], abs=TO_HUGGING_FACE)


@pytest.mark.full
def test_lora_and_an_initial_state_in_one_adapter(tmp_path):
    fixture = "lfm2"
    prompt = Case(fixture).prompts[4].tolist()
    lora = LoRARequest("lora", 1, str(FIXTURES / fixture / "adapter"))
    state = write(tmp_path / "state", layers_of(1, fixture), fixture)
    both, zero = (LoRARequest(name, 1, str(tmp_path / name)) for name in ("both", "zero"))
    for request, scale in ((both, 0.5), (zero, 0.0)):
        shutil.copytree(lora.lora_path, request.lora_path)
        write(tmp_path / request.lora_name, layers_of(1, fixture, scale), fixture)
    adapters = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 4, "max_initial_states": 3}
    with LLM(str(FIXTURES / fixture), **adapters, **FLAGS) as llm:
        requests = [lora, zero, both, state]
        outputs = [said(each) for each in llm.generate([prompt] * 4, GREEDY, lora_request=requests)]
        assert same(outputs[0], outputs[1])
        assert not any(same(outputs[i], outputs[j]) for i, j in ((0, 2), (0, 3), (2, 3)))
        digests = llm.engine.adapters.loaded
        assert len(set(digests.values())) == len(digests) == 4
    with LLM(str(FIXTURES / fixture), enable_lora=True, max_lora_rank=4, **FLAGS) as llm:
        with pytest.raises(RequestError, match="learned initial state, which needs the flag max_initial_states"):
            llm.generate(prompt, GREEDY, lora_request=both)
    with LLM(str(FIXTURES / fixture), max_initial_states=1, **FLAGS) as llm:
        with pytest.raises(RequestError, match="LoRA matrices, which need the flag enable_lora"):
            llm.generate(prompt, GREEDY, lora_request=both)
        assert same(said(llm.generate(prompt, GREEDY, lora_request=state)[0]), outputs[3])
