"""Converts a request's fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.common import GenerationRequest
from serving.api.http.protocol.completions import CompletionRequest
from serving.engine.request_error import RequestError
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.grammar_state import StructuredOutputs

COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as in OpenAI's API."""

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "skip_special_tokens", "return_sampling_mask",
)  # fmt: skip


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """Returns the engine's parameters for a request. `defaults` apply to omitted fields; `more` is passed to
    `SamplingParams`.

    Raises:
        RequestError: the engine refuses a value.
    """
    values = dict(defaults)
    values.update(
        (name, getattr(request, name))
        for name in _SAME_NAME
        if name in request.model_fields_set and getattr(request, name) is not None
    )
    values["structured_outputs"] = structured_outputs(request)
    match request:
        case CompletionRequest():
            limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
            values["max_tokens"] = max(limit, 1)
            values["logprobs"] = request.logprobs
            values["prompt_logprob_token_ids"] = request.prompt_logprob_token_ids
            if request.echo:
                values["prompt_logprobs"] = request.logprobs
        case ChatRequest():
            limits = (request.max_completion_tokens, request.max_tokens)
            values["max_tokens"] = next((limit for limit in limits if limit is not None), None)
            values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(**values, **more)


def structured_outputs(request: GenerationRequest) -> StructuredOutputs | None:
    """Returns the output format that a request specifies in vLLM's or OpenAI's field.

    Raises:
        RequestError: both are set, or the format is invalid.
    """
    form, own = request.response_format, request.structured_outputs
    if form is not None and form.type != "text":
        if own is not None:
            raise RequestError("response_format and structured_outputs cannot be combined")
        if form.json_schema is not None and form.type == "json_schema":
            return StructuredOutputs(json=form.json_schema.schema_)
        return StructuredOutputs(json_object=True)
    if own is None:
        return None
    return StructuredOutputs(
        json=own.json_, regex=own.regex, choice=own.choice, grammar=own.grammar, json_object=own.json_object
    )
