"""Fields shared by completions and chat completions; errors, models and usage."""

from __future__ import annotations

import base64
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from serving.engine.requests.sampling_params import NEAREST, few_biases, is_neutral

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list for which pydantic reports only the first invalid item, because a list may have a million of them."""


class EncodedArray(BaseModel):
    """A NumPy array: `np.frombuffer(base64.b64decode(data), dtype).reshape(shape)`."""

    shape: list[int]
    dtype: str
    data: str

    @classmethod
    def of(cls, array: np.ndarray | None) -> EncodedArray | None:
        """Returns the encoded array; None for None."""
        if array is None:
            return None
        data = base64.b64encode(array.tobytes()).decode()
        return cls(shape=list(array.shape), dtype=array.dtype.name, data=data)


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Items[Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]]
MAX_STOP_TEXTS = 64

_NOT_SERVED = tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text(encoding="utf-8"))
_UNSUPPORTED = {name: way for way, names in _NOT_SERVED["fields"].items() for name in names}
_UNSUPPORTED |= {name: NEAREST[parameter] for name, parameter in _NOT_SERVED["parameters"].items()}
REFUSED_PATHS = {path: why for why, paths in _NOT_SERVED["paths"].items() for path in paths}
"""Paths of other servers, and why this one answers them with 404."""
_WITHOUT_EFFECT = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier")
"""OpenAI's fields that do not change a response of this server. They are accepted and not reported as ignored."""


_TOOL_CHOICES = ("function", "custom", "allowed_tools", "auto", "any", "tool", "none")
CUSTOM_INPUT = "input"
"""The argument of a tool of type `custom`, which is a function with one text."""
OF_GRAMMAR = "x-lark"
"""Word of a schema: the Lark grammar of a text."""


def custom_parameters(form: Any) -> dict[str, Any]:
    """Returns the parameters of a function for a tool of type `custom`; `form`: the format of its text."""
    text: dict[str, Any] = {"type": "string"}
    grammar = form.get("grammar", form) if isinstance(form, dict) else None
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        syntax, definition = grammar.get("syntax"), grammar["definition"]
        text |= {"pattern": f"^(?:{definition})$"} if syntax == "regex" else {OF_GRAMMAR: definition}
    return {
        "type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT], "additionalProperties": False
    }  # fmt: skip


def refusal(param: str, message: str) -> PydanticCustomError:
    """Returns a validation error about several fields; `param` is the field to report."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


def _is_function(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return not isinstance(kind, str) or kind in ("function", "custom")


def _with_functions(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a request with only those tools that are functions of the client.

    The tools of a namespace stand for themselves. The server cannot run tools such as `web_search`: it leaves them out,
    and names them like fields without effect.
    """
    tools = values.get("tools")
    if not isinstance(tools, list):
        return values
    kept, waiting = list[Any](), list(reversed(tools))
    while waiting:
        tool = waiting.pop()
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = [{"namespace": tool.get("name"), **each} for each in tool["tools"] if isinstance(each, dict)]
            waiting += reversed(inner)
        elif _is_function(tool) or isinstance(tool.get("input_schema"), dict):
            kept.append(tool)
        else:
            values[f"tools.{kind}"] = True
    choice: Any = values.get("tool_choice")
    allowed = choice.get("allowed_tools", choice) if isinstance(choice, dict) else None
    if isinstance(allowed, dict) and isinstance(listed := allowed.get("tools"), list):
        ours = [*filter(_is_function, listed)]
        changed = {**allowed, "tools": ours}
        choice = {**choice, "allowed_tools": changed} if "allowed_tools" in choice else changed
        values["tool_choice"] = choice = choice if ours or not listed else "none"
    served = not isinstance(choice, dict) or choice.get("type") in _TOOL_CHOICES
    if len(kept) < len(tools) and not (kept and served):
        values.pop("tool_choice", None)
    return {**values, "tools": kept or None}


class Options(BaseModel):
    """An object in which null is the default of each field, as in OpenAI's API."""

    @model_validator(mode="before")
    @classmethod
    def _accept_null(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class RequestModel(Options):
    """A request. Unknown fields are ignored, as in vLLM, and named in the header `x-ignored-fields`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    model: str | None = Field(None, description="One of the served names; optional.")

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have no effect."""
        extra = self.model_extra or {}
        return [name for name, value in extra.items() if value is not None and name not in _WITHOUT_EFFECT]

    @model_validator(mode="before")
    @classmethod
    def _convert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        # Ignoring these fields would give other output than the client expects.
        for name in _UNSUPPORTED.keys() & values.keys():
            if not is_neutral(name, values[name]):
                raise refusal(name, f"{name} is not supported: {_UNSUPPORTED[name]}")
        given = dict(values)
        if (budget := given.pop("thinking_budget", None)) is not None:  # Qwen's name
            given |= {"thinking_token_budget": budget} if given.get("thinking_token_budget") is None else {}
        return _with_functions(given)


class StreamOptions(Options):
    """Options of a stream."""

    include_usage: bool = Field(default=False, description="Send a final event with the usage of the whole request.")
    continuous_usage_stats: bool = Field(default=False, description="Report the usage so far in every event.")


class JsonSchema(Options):
    """OpenAI's envelope of a JSON schema."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Options):
    """The required format of the output."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        None, alias="schema", description="The schema without a json_schema around it, as in other APIs."
    )
    format: dict[str, Any] | None = Field(None, description="Of type structural_tag: the format, as in XGrammar.")
    structures: Items[dict[str, Any]] | None = Field(None, description="Its older form, with triggers.")
    triggers: Items[str] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("response_format of type json_schema needs a json_schema")
        return self


class StructuredOutputs(Options):
    """The required format of the output, in vLLM's syntax: exactly one field."""

    model_config = ConfigDict(extra="allow")
    json_: dict[str, Any] | str | bool | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(None, description="A context-free grammar in Lark's syntax, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: str | None = Field(None, description="A response_format of type structural_tag, as JSON.")

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        values = ((name, getattr(self, name)) for name in type(self).model_fields)
        set_fields = [name for name, value in values if value is not None and value is not False]
        if len(set_fields) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar, json_object and structural_tag must be set")
        return self


class TextRequest(RequestModel):
    """A request for text."""

    stream: bool = False

    @property
    def num_continued(self) -> int:
        """Number of prompts that need no more than their state: 0 if the response has scores of the prompts."""
        return 1


class GenerationRequest(TextRequest):
    """Sampling, limits and streaming. Fields beyond OpenAI's have vLLM's names and meanings."""

    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int32 | None = Field(None, description="0 or -1 keeps all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    max_tokens: Count | None = None
    min_tokens: Count = 0
    stop: str | Annotated[Items[str], Field(max_length=MAX_STOP_TEXTS)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[StrictInt, float], BeforeValidator(few_biases)] | None = None
    skip_special_tokens: bool = True
    stream_options: StreamOptions | None = None
    priority: Int32 = Field(0, description="Requests with smaller values run first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Only requests with the same salt share cached prefixes."
    )
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep only the last tokens of the prompt; -1 keeps what fits."
    )
    return_token_ids: bool = Field(
        False,
        description="Also return the ids of prompt and output tokens, the versions of the weights and, with "
        "--enable-return-routed-experts, the experts of each token.",
    )
    return_sampling_mask: bool = Field(
        False,
        description="Also return sampling_mask: the tokens that each output token could have been, one bit for each of "
        "the vocabulary. Needs --enable-return-sampling-mask.",
    )
    return_tokens_as_token_ids: bool = Field(False, description='Name tokens "token_id:42" in log-probabilities.')
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options needs stream=true")
        return self


class WholeAnswer(BaseModel):
    """A response that is serialized with all fields, including unset ones."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")
    cache_write_tokens: int = Field(0, description="Prompt tokens added to the prefix cache, up to its marks.")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int | None = Field(default=None, description="Reasoning tokens, including the marks.")
    accepted_prediction_tokens: int | None = Field(default=None, description="Accepted draft tokens.")
    rejected_prediction_tokens: int | None = Field(default=None, description="Rejected draft tokens.")


class Usage(BaseModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Choice(BaseModel):
    """What the choices of both older APIs have."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    weights_versions: list[tuple[str, int]] | None = None
    routed_experts: EncodedArray | None = None
    sampling_mask: EncodedArray | None = None


class ChoicesResponse(BaseModel):
    """A response that is a list of choices, or (with `usage` null) one event of a stream."""

    id: str
    created: int
    model: str
    usage: Usage | None = None


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """OpenAI's error object."""

    error: ErrorBody


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mamba-jax"
    root: str | None = None
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
