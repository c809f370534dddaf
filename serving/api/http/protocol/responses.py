"""`/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serving.api.http.protocol.chat import ChatLogprob, ConvertedRequest, ReasoningChoice, as_named_function
from serving.api.http.protocol.common import Count, Items, Options, PromptTokensDetails, WholeAnswer, refusal


def _without_envelope(value: Any) -> Any:
    """Returns a function, or the choice of one, that is in the form of another API."""
    if not isinstance(value, dict):
        return value
    names = (name for name in ("function", "custom") if isinstance(value.get(name), dict))
    flat = next(({**value[name], "type": name} for name in names), value)
    if not isinstance(schema := flat.get("input_schema"), dict):
        return flat
    others = {name: each for name, each in flat.items() if name != "input_schema"}
    return {**others, "type": "function", "parameters": flat.get("parameters") or schema}


def _as_choice(choice: Any) -> Any:
    """Returns a `tool_choice` in the form of this API."""
    fields = choice if isinstance(choice, dict) else {}
    if isinstance(allowed := fields.get("allowed_tools"), dict):
        return {**allowed, "type": "allowed_tools"}
    return _without_envelope(choice if fields.get("type") in ("function", "custom") else as_named_function(choice))


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function", "custom"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(BaseModel):
    """A function that the model may or must call."""

    type: Literal["function", "custom"]
    name: str


class AllowedFunctions(BaseModel):
    """The subset of the tools that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[Annotated[NamedFunction, BeforeValidator(_without_envelope)]] = Field(min_length=1)


class TextFormat(Options):
    """The required format of the output."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Options):
    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))


class ReasoningOptions(ReasoningChoice):
    summary: str | None = None


LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED = ("background", "conversation", "prompt")


class ResponsesRequest(ConvertedRequest):
    """A conversation to continue. Other fields have the meaning that they have in `/v1/chat/completions`."""

    input: str | Items[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = Field(
        None, max_length=128, description="Id of a stored response of this process, to continue its conversation."
    )
    store: bool | None = Field(None, description="Store the response in memory, within limits, until the process ends.")
    max_output_tokens: Count | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    tools: Items[Annotated[FunctionTool, BeforeValidator(_without_envelope)]] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions, BeforeValidator(_as_choice)
    ] | None = None  # fmt: skip
    parallel_tool_calls: bool | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Items[str] | None = Field(None, description=f"{LOGPROBS} adds log-probabilities; others have no effect.")
    metadata: dict[str, str] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the response includes log-probabilities of the text."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _refuse(self) -> ResponsesRequest:
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise refusal(name, f"{name} is not supported")
        if self.text.format.type == "json_schema" and self.text.format.schema_ is None:
            raise refusal("text", "text.format of type json_schema needs a schema")
        return self


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[ChatLogprob] = Field(default_factory=list)


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    """The text of the answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoning(BaseModel):
    """The reasoning before the answer."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: Status


class OutputCall(BaseModel):
    """A function call by the model; also `namespace`, if the function is from one."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class OutputCustomCall(BaseModel):
    """A call of a tool of type `custom` by the model."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str
    call_id: str
    name: str
    input: str
    status: Status


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(WholeAnswer):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    error: None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    store: bool
    temperature: float | None = None
    text: TextOptions
    tool_choice: Any
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(WholeAnswer):
    """The input of a stored response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class InputTokens(WholeAnswer):
    """The number of tokens of a request's input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
