"""What requests for completions and for chat completions have in common; errors, models and usage."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first bad item is complained of, not each of a million."""

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Items[Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]]
MAX_STOP_TEXTS = 64

_OLD_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_WITHOUT_EFFECT = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier")
"""OpenAI's fields that change nothing about an answer here, and are therefore taken without a word."""


def refusal(param: str, message: str) -> PydanticCustomError:
    """A complaint about fields that do not go together; `param` is the one to name."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


class RequestModel(BaseModel):
    """A request. Unknown fields are ignored, as in vLLM, and named in the header `x-ignored-fields`."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @property
    def ignored(self) -> list[str]:
        """Names of fields that had no effect."""
        extra = self.model_extra or {}
        return [name for name, value in extra.items() if value is not None and name not in _WITHOUT_EFFECT]

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, values: Any) -> Any:
        # Ignoring these would give answers in the wrong form.
        for old, new in _OLD_NAMES.items():
            if isinstance(values, dict) and values.get(old) is not None:
                raise refusal(old, f'{old} is an old name: use {{"structured_outputs": {{"{new}": ...}}}}')
        return values


class StreamOptions(BaseModel):
    """What a stream reports in addition to the text."""

    include_usage: bool = Field(default=False, description="A last event with the usage of the whole request.")
    continuous_usage_stats: bool = Field(default=False, description="The usage so far, in every event.")


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a JSON schema."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("response_format of type json_schema needs a json_schema")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's way to say what form the answer must have: exactly one of these."""

    model_config = ConfigDict(extra="forbid")
    json_: dict[str, Any] | str | bool | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(None, description="A context-free grammar in Lark's syntax, or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self if value is not None and value is not False]
        if len(given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object is needed")
        return self


class GenerationRequest(RequestModel):
    """Sampling, limits and streaming. Fields beyond OpenAI's have the names and meanings of vLLM's."""

    model: str | None = Field(None, description="One of the served names; may be left out.")
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Int32 | None = Field(None, description="0 or -1 keeps all.")
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
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int32 = Field(0, description="Smaller is served first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Prefixes are shared between requests of equal salt only."
    )
    add_special_tokens: bool | None = None
    return_token_ids: bool = Field(
        False, description="Also give the ids of prompt and output tokens, and the versions of the weights."
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
    """An answer that is written with all of its fields, including those that are not set."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens whose computation the prefix cache saved.")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int | None = Field(default=None, description="Tokens of reasoning, its marks included.")
    accepted_prediction_tokens: int | None = Field(default=None, description="Draft tokens that were right.")
    rejected_prediction_tokens: int | None = Field(default=None, description="Draft tokens that were not.")


class Usage(BaseModel):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


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
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
