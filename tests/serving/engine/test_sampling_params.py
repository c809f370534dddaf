"""Sampling parameters: vLLM's defaults, and one clear error per bad value."""

import numpy as np
import pytest

from mamba_jax.sampling import sampling_row
from serving.core.errors import RequestError
from serving.engine.requests.sampling_params import SamplingParams


def test_defaults_are_those_that_vllm_users_know():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, -1, 0.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert params.detokenize
    assert not params.ignore_eos
    assert not params.penalized


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -0.1, "temperature must be a number from 0 up to 1e+06, got -0.1"),
        ("temperature", float("nan"), "temperature must be a number from 0 up to 1e+06"),
        ("temperature", "hot", "temperature must be a number from 0 up to 1e+06, got 'hot'"),
        ("top_p", 0.0, "top_p must be a number above 0 up to 1, got 0.0"),
        ("top_p", 1.1, "top_p must be a number above 0 up to 1"),
        ("top_k", -2, "top_k must be an integer from -1 up to 2147483647, got -2"),
        ("top_k", 1.5, "top_k must be an integer from -1 up to 2147483647"),
        ("min_p", 2, "min_p must be a number from 0 up to 1"),
        ("n", 0, "n must be an integer from 1 up to 128, got 0"),
        ("max_tokens", 0, "max_tokens must be an integer from 1 up to 2147483647 or None, got 0"),
        ("max_tokens", True, "max_tokens must be an integer from 1 up to 2147483647 or None, got True"),
        ("min_tokens", 17, "min_tokens must be an integer from 0 up to 16, got 17"),
        ("logprobs", 21, "logprobs must be an integer from 0 up to 20 or None, got 21"),
        ("prompt_logprobs", -1, "prompt_logprobs must be an integer from 0 up to 20 or None, got -1"),
        ("presence_penalty", 2.5, "presence_penalty must be a number from -2 up to 2"),
        ("repetition_penalty", 0, "repetition_penalty must be a number from 1e-06 up to 1e+06"),
        ("stop", [""], "stop must not hold an empty text"),
        ("stop", [1], "stop must be a list of texts"),
        ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
        ("stop_token_ids", [-1], "stop_token_ids must be a list of token ids (0 to 2147483647)"),
        ("prompt_logprob_token_ids", [-1], "prompt_logprob_token_ids must be a list of token ids (0 to 2147483647)"),
        ("prompt_logprob_token_ids", [3] * 129, "prompt_logprob_token_ids has 129 ids: at most 128 are allowed"),
        ("logit_bias", {"x": 1}, "logit_bias must be a table of token id to finite number"),
        ("stop_token_ids", [2**31], "stop_token_ids must be"),
        ("stop_token_ids", [10**400], "stop_token_ids must be"),
        ("logit_bias", {2**31: 1.0}, "logit_bias must be"),
        ("logit_bias", {float("inf"): 1.0}, "logit_bias must be"),
        ("logit_bias", {3: 10**400}, "logit_bias must be"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
        ("seed", 1.0, "seed must be an integer from -9223372036854775808 up to 9223372036854775807 or None, got 1.0"),
    ],
)
def test_each_bad_value_has_one_clear_line(name, value, said):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert said in str(error.value)


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**400])
@pytest.mark.parametrize(
    "name", ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed", "temperature"]
)
def test_no_number_is_too_large_to_be_refused(name, value):
    if name == "seed" and value < 2**63:
        return
    with pytest.raises(RequestError, match=rf"^{name} must be"):
        SamplingParams(**({"max_tokens": None} | {name: value}))


def test_what_was_sent_is_not_sent_back_at_length():
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature="x" * 1_000_000)
    assert len(str(error.value)) < 200


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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temprature", 1, "unknown sampling parameter 'temprature'; did you mean 'temperature'?"),
        ("bad_words", ["no"], "bad_words is not supported: give the tokens of these words logit_bias -100"),
        ("allowed_token_ids", [1], "allowed_token_ids is not supported: give each allowed token logit_bias 100"),
        ("best_of", 2, "best_of is not supported: use n"),
        ("thinking_token_budget", 0, "thinking_token_budget is not supported: "),
        ("guided_decoding", {"regex": "a"}, "guided_decoding is not supported: use structured_outputs"),
        ("logits_processors", [len], "logits_processors is not supported: use logit_bias"),
        ("truncate_prompt_tokens", 5, "truncate_prompt_tokens is not supported: cut the prompt's token ids"),
    ],
)
def test_unknown_and_unsupported_names_get_one_line(name, value, said):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    assert said in str(error.value)
    if name != "temprature":
        assert SamplingParams(**{name: None}) == SamplingParams()


def test_what_comes_from_json_and_numpy():
    params = SamplingParams(logit_bias={"7": 500, 8: -1.5}, stop="end", stop_token_ids=[np.int64(3)], seed=np.int32(4))
    assert params.logit_bias == {7: 100.0, 8: -1.5}
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)


def test_stop_texts_need_text():
    with pytest.raises(RequestError, match="stop texts need detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_limits_are_those_of_the_devices_table():
    from mamba_jax.sampling import table
    from serving.engine.requests import sampling_params

    for name in ("MAX_LOGIT_BIAS", "MAX_LOGPROBS", "MAX_PROMPT_LOGPROB_IDS"):
        assert getattr(sampling_params, name) == getattr(table, name)
