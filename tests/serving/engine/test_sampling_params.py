"""Sampling parameters: vLLM's defaults, and one clear error per bad value."""

import base64
import contextlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from checkpoints import load_model
from checkpoints.tokenizer import load_tokenizer
from mamba_jax.sampling import sampling_row
from serving import LLM, RequestError, SamplingParams, unpack_sampling_mask
from serving.engine.structured.grammars import StructuredOutputs
from tests.mamba_jax.test_sampling import reference
from tests.support.engines.engines import leave_pages
from tests.support.models import golden_case
from tests.support.models.golden_case import FIXTURES
from tests.support.selection import slow
from tests.support.servers.live_server import LiveServer


def test_defaults_are_those_that_vllm_users_know():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert params.detokenize
    assert not params.ignore_eos
    assert not params.penalized


WRONG = {
    "temperature": (-0.1, float("nan"), "hot"), "top_p": (0.0, 1.1), "top_k": (-2, 1.5), "min_p": (2,), "n": (0,),
    "max_tokens": (0, True), "min_tokens": (17,), "logprobs": (1025,), "prompt_logprobs": (-1,),
    "presence_penalty": (2.5,), "repetition_penalty": (0,), "stop": ([""], [1], b"a", [b"a"]), "ignore_eos": (1,),
    "seed": (1.0,),
    "stop_token_ids": ("12", [-1], [2**31], [10**400]), "prompt_logprob_token_ids": ([-1], [3] * 129),
    "logit_bias": ({"x": 1}, {"1.0": 1}, {2**31: 1.0}, {float("inf"): 1.0}, {1.5: 1.0}, {3: 10**400}),
}  # fmt: skip


class Watched(list):
    """Counts how many of its items are read."""

    read = 0

    def __iter__(self):
        for item in super().__iter__():
            self.read += 1
            yield item


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (lambda items: SamplingParams(stop=items), 1),
        (lambda items: SamplingParams(stop_token_ids=items), 0),
        (lambda items: SamplingParams(prompt_logprob_token_ids=items), 0),
        (lambda items: StructuredOutputs(choice=items), 1),
        (lambda _: SamplingParams(temperature="x" * 1_000_000), 0),
    ],
    ids=["stop", "stop_token_ids", "prompt_logprob_token_ids", "choice", "long text"],
)
def test_a_long_list_is_refused_by_its_length_or_first_item(values, read):
    """And what was sent is not sent back at length."""
    items = Watched([None] * 1000)
    with pytest.raises(RequestError) as refusal:
        values(items)
    assert items.read == read
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_each_bad_value_has_one_clear_line(name, value):
    with pytest.raises(RequestError, match=rf"^{name}(:| must) ") as error:
        SamplingParams(**{name: value})
    said = str(error.value)
    assert "\n" not in said
    assert not isinstance(value, int | float) or said.endswith(f", got {value}")


def test_lines_say_what_is_allowed():
    for fields, allowed in (
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"), ({"top_p": 2}, "or equal to 1, got 2"),
        ({"max_tokens": True}, "must be an integer, got True"), ({"stop": [1]}, r"must be a list of texts, got \[1\]"),
        ({"stop_token_ids": [-1]}, "must be greater than or equal to 0, got -1"),
        ({"logit_bias": {"x": 1}}, "must be a valid integer, got 'x'"),
        ({"stop": "x", "detokenize": False}, "stop texts need detokenize=True"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=allowed):
            SamplingParams(**fields)


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**400])
@pytest.mark.parametrize(
    "name", ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed", "temperature"]
)
def test_no_number_is_too_large_to_be_refused(name, value):
    if name == "seed" and value < 2**63:
        return
    with pytest.raises(RequestError, match=rf"^{name}: must be"):
        SamplingParams(**({"max_tokens": None} | {name: value}))


def test_the_largest_values_fit_the_table_and_sample():
    """Whatever is allowed becomes arrays, and divides logits without overflow."""
    params = SamplingParams(
        top_k=2**31 - 1, min_tokens=2**31 - 1, max_tokens=2**31 - 1, seed=-(2**63), temperature=1e-5,
        repetition_penalty=1e-6, stop_token_ids=[2**31 - 1], logit_bias={2**31 - 1: 1e300},
    )  # fmt: skip
    row = sampling_row(
        top_k=params.top_k, min_tokens=params.min_tokens, seed=params.seed, temperature=params.temperature,
        repetition_penalty=params.repetition_penalty, stop_ids=params.stop_token_ids, logit_bias=params.logit_bias,
    )  # fmt: skip
    assert row.min_tokens == 2**31 - 1
    assert np.isfinite(np.float32(1e4) / row.temperature / row.repetition_penalty)
    assert SamplingParams(temperature=1e-300).greedy


FORM = partial(StructuredOutputs, regex="a")


@pytest.mark.parametrize(
    ("make", "name", "value", "said"),
    [
        (SamplingParams, "temprature", 1, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        (SamplingParams, "bad_words", np.array(["a", "b"]), ": "),
        (SamplingParams, "bad_words", ["no"], ": give the tokens of these words logit_bias -100"),
        (SamplingParams, "allowed_token_ids", [1], ": give each allowed token logit_bias 100"),
        (SamplingParams, "best_of", 2, ": use n"),
        (SamplingParams, "thinking_token_budget", 0, ": "),
        (SamplingParams, "guided_decoding", {"regex": "a"}, ": use structured_outputs"),
        (SamplingParams, "logits_processors", [len], ": use logit_bias"),
        (SamplingParams, "truncate_prompt_tokens", 5, ": cut the prompt's token ids"),
        (FORM, "jsn", {}, "unknown field of structured outputs 'jsn'; did you mean 'json'?"),
        (FORM, "typo", 1, "unknown field of structured outputs 'typo'"),
        (FORM, "whitespace_pattern", " ?", ": use grammar or regex"),
        (FORM, "disable_fallback", True, ": "),
    ],
)
def test_unknown_and_unsupported_names_get_one_line(make, name, value, said):
    unsupported = said.startswith(": ")
    with pytest.raises(RequestError) as error:
        make(**{name: value})
    assert (f"{name} is not supported{said}" if unsupported else said) in str(error.value)
    if unsupported:
        assert make(**{name: None}) == make()
    assert FORM(disable_fallback=False) == FORM()


def test_what_comes_from_json_and_numpy():
    bias = {"7": 500, 8: -1.5, np.int32(4): np.float32(1.5)}
    params = SamplingParams(logit_bias=bias, stop="end", stop_token_ids=[np.int64(3)], seed=np.int64(2**53 + 1))
    assert params.logit_bias == {7: 100.0, 8: -1.5, 4: 1.5}
    assert (params.stop, params.stop_token_ids, params.seed) == (("end",), (3,), 2**53 + 1)
    assert SamplingParams(seed=np.int32(4)).seed == 4


def test_limits_are_those_of_the_devices_table():
    from mamba_jax.sampling import table
    from serving.engine.requests import sampling_params

    for name in ("MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_PROMPT_LOGPROB_IDS"):
        assert getattr(sampling_params, name) == getattr(table, name)


pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = golden_case.FLAGS | {"enable_return_sampling_mask": True, "num_slots": 60, "num_pages": 100}
MODEL, VOCAB = FIXTURES / "nemotronh-moe", 509
DRAFTS = {"num_speculative_tokens": 2, "speculative_method": "mtp", "adaptive_drafts": False}
LIMITS = [
    {"temperature": 0.0},
    {"temperature": 0.2, "top_k": 5},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.01, "n": 3},
    {"temperature": 1.0},
    {"temperature": 0.4, "top_p": 0.8, "logit_bias": {5: 100.0, 6: 100.0, 9: 100.0}},
    {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {5: 100.0, 6: 100.0, 9: 100.0}},  # in turn: drafts
    {"temperature": 1.0, "top_p": 0.5, "logprobs": 3, "min_tokens": 40, "stop_token_ids": [7, 8]},
]
PARAMS = [
    SamplingParams(seed=i, max_tokens=40, ignore_eos=True, return_sampling_mask=True, **limits)
    for i, limits in enumerate(LIMITS)
]


@pytest.fixture(scope="module")
def said_by_model():
    return partial(golden_case.log_probs, load_model(MODEL, dtype="float32", progress=False))


def defined(said, params, before):
    """The tokens that can be drawn after those `before` in the output, and the logits that decide it."""
    given = {name: getattr(params, name) for name in ("temperature", "logit_bias", "frequency_penalty", "min_tokens")}
    given |= {"stop_ids": params.stop_token_ids, "counts": np.bincount(np.array(before, int), minlength=len(said))}
    limits = {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
    x, kept = (reference(said, output_index=len(before), **given, **each) for each in ({}, limits))
    if params.greedy:
        return np.arange(len(x)) == x.argmax(), x
    return np.exp(kept - kept.max()) > 1e-37, x


def check(output, params, said_by_model):
    """Returns how many tokens of the vocabulary were near a limit, so that rounding decides them."""
    near = 0
    for choice in output.outputs:
        assert choice.sampling_mask.dtype == np.uint8
        assert choice.sampling_mask.shape == (len(choice.token_ids), -(-VOCAB // 8))
        masks = unpack_sampling_mask(choice.sampling_mask, VOCAB)
        said = said_by_model([*output.prompt_token_ids, *choice.token_ids])[len(output.prompt_token_ids) - 1 :]
        for i, (token, mask, each) in enumerate(zip(choice.token_ids, masks, said, strict=False)):
            expected, x = defined(each, params, choice.token_ids[:i])
            assert mask[token]
            different = mask != expected
            assert (np.abs(x[different] - x[expected].min()) < 1e-3).all()
            near += different.sum()
    return near


def engine_of(model=MODEL, **flags):
    return LLM(str(model), **(FLAGS | flags))


def ask(llm, params=PARAMS):
    rng = np.random.default_rng(4)
    prompts = [{"prompt_token_ids": rng.integers(0, 250, 5 + 9 * i).tolist()} for i in range(len(params))]
    return llm.generate(prompts, params)


@pytest.fixture(scope="module")
def plain():
    return engine_of()


@pytest.mark.full
def test_masks_are_the_definitions(plain, said_by_model):
    for _ in range(2):  # the second finds prompts in the cache, and compiles the programs for that
        without = ask(plain, [replace(each, return_sampling_mask=False) for each in PARAMS])
    compiled = plain.engine.stats()["compilations"]
    outputs = ask(plain)
    assert plain.engine.stats()["compilations"] == compiled
    for output, other in zip(outputs, without, strict=True):
        assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in other.outputs]
        assert all(choice.sampling_mask is None for choice in other.outputs)
    assert sum(check(*each, said_by_model) for each in zip(outputs, PARAMS, strict=True)) < 20
    sizes = [unpack_sampling_mask(output.outputs[0].sampling_mask, VOCAB).sum(axis=1) for output in outputs]
    assert (sizes[0] == 1).all()
    assert (sizes[1] == 5).all()
    assert (sizes[5] == VOCAB).all()
    assert len(set(sizes[3].tolist())) > 3


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [DRAFTS, slow({"num_speculative_tokens": 3, "speculative_method": "ngram", "adaptive_drafts": False}), {}],
    ids=["mtp", "ngram", "preempted"],
)
def test_drafts_and_preemption_change_no_mask(plain, said_by_model, flags):
    llm = engine_of(**flags)
    if not flags:
        leave_pages(llm, 11)
    outputs, expected = ask(llm), ask(plain)
    if not flags:
        assert llm.engine.stats()["preemptions"] > 0
    else:
        assert llm.engine.stats()["drafts"]["accepted"] > 0
    for output, other, params in zip(outputs, expected, PARAMS, strict=True):
        assert check(output, params, said_by_model) < 5
        for choice, same in zip(output.outputs, other.outputs, strict=True):
            assert choice.token_ids == same.token_ids


@pytest.mark.full
def test_structured_outputs_and_the_server():
    tokenizer = load_tokenizer("demo")
    digits = {i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) in set("0123456789")}
    flags = {"num_speculative_tokens": 2, "speculative_method": "ngram", "enable_structured_outputs": True}
    llm = engine_of("demo", **flags)
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=6, return_sampling_mask=True, stop=["99"],
        structured_outputs=StructuredOutputs(regex="[0-9]{40}"),
    )  # fmt: skip
    (output,) = llm.generate(["Tom has "], params)
    masks = unpack_sampling_mask(output.outputs[0].sampling_mask, tokenizer.vocab_size)
    assert len(masks) == len(output.outputs[0].token_ids)
    allowed = set(masks.any(axis=0).nonzero()[0].tolist())
    assert digits <= allowed
    assert all(set(tokenizer.token_text(token)) <= set("0123456789") for token in allowed)
    with contextlib.closing(LiveServer(llm.engine, prepare=False)) as server:
        server.wait_until_ready()
        body = {"max_tokens": 4, "ignore_eos": True, "temperature": 1.0, "top_k": 3, "n": 2}
        for stream in (False, True):
            answer = server.complete([5, 6, 7], **body, return_sampling_mask=True, stream=stream)
            assert answer.status_code == 200, answer.text
        answer = server.complete([5, 6, 7], **body, return_sampling_mask=True, return_token_ids=True).json()
        for choice in answer["choices"]:
            found = choice["sampling_mask"]
            mask = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
            masks = unpack_sampling_mask(mask, tokenizer.vocab_size)
            assert (masks.sum(axis=1) == 3).all()
            assert masks[np.arange(4), choice["token_ids"]].all()
        assert "sampling_mask" not in server.complete([5, 6, 7], **body).json()["choices"][0]
        chat = {"messages": [{"role": "user", "content": "Tom"}], "max_tokens": 3, "return_sampling_mask": True}
        (choice,) = server.http.post("/v1/chat/completions", json=chat | {"ignore_eos": True}).json()["choices"]
        assert choice["sampling_mask"]["shape"] == [3, -(-tokenizer.vocab_size // 8)]
        text = server.http.post("/v1/chat/completions", json=chat | {"stream": True}).text
        assert text.count('"sampling_mask":{') == 1


def test_bits_are_unpacked_in_the_order_of_tokens():
    mask = np.zeros((2, 2), np.uint8)
    mask[0, 0], mask[1, 1] = 1 << 3, 1 << 1
    assert unpack_sampling_mask(mask, 10).nonzero()[1].tolist() == [3, 9]
    with pytest.raises(ValueError, match="a mask of 2 bytes: a vocabulary of 17 has 3"):
        unpack_sampling_mask(mask, 17)
