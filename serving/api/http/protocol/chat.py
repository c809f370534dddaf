"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serving.api.http.protocol.common import (
    Choice,
    ChoicesResponse,
    Count,
    GenerationRequest,
    Items,
    Options,
    TextRequest,
    TokenIds,
    custom_parameters,
    refusal,
)


class ContentPart(BaseModel):
    """A part of a message. The model reads text; of other parts it reads that they are left out."""

    model_config = ConfigDict(extra="allow")
    type: str = "text"
    text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _text(cls, part: Any) -> Any:
        return {"text": part} if isinstance(part, str) else part


class Message(BaseModel):
    """One message. Other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: str = Field(min_length=1)
    content: str | Items[ContentPart] | None = None
    tool_calls: Items[dict[str, Any]] | None = None


def _schema_of_object(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    """Checks the parts of a JSON schema that the server reads."""
    properties, required = (schema or {}).get("properties"), (schema or {}).get("required")
    if properties is not None and not isinstance(properties, dict):
        raise ValueError("properties must be an object")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise ValueError("required must be a list of strings")
    for name, value in (properties or {}).items():
        if not isinstance(value, dict | bool):
            raise ValueError(f"properties: {name[:64]!r} must be a JSON schema")
        if isinstance(value, dict) and not isinstance(value.get("enum"), list | None):
            raise ValueError(f"properties: enum of {name[:64]!r} must be a list")
    return schema


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, AfterValidator(_schema_of_object)] = None


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


def _as_function(tool: Any) -> Any:
    """Returns a tool in the form of another API as a function: one of type `custom` has one text argument."""
    kind = tool.get("type") if isinstance(tool, dict) else ""
    if kind not in ("function", "custom", None) or isinstance(tool.get("function"), dict):
        return {**tool, "type": "function"} if kind is None else tool
    own = tool["custom"] if isinstance(tool.get("custom"), dict) else tool
    parameters = own.get("input_schema", own.get("parameters"))
    if kind == "custom" and parameters is None:
        parameters = custom_parameters(own.get("format"))
    function = {"name": own.get("name"), "description": own.get("description"), "parameters": parameters}
    function = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": function, "cache_control": tool.get("cache_control")}


AnyTool = Annotated[Tool, BeforeValidator(_as_function)]
"""A function in the form of any of the chat APIs."""


def as_named_function(choice: Any) -> Any:
    """Returns a `tool_choice` of any of the chat APIs in the form of this one."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if isinstance(choice, dict) and kind in ("function", "custom", "tool"):
        return {"type": "function", "function": choice.get("function", choice.get("custom", choice))}
    return {"auto": "auto", "any": "required", "none": "none"}.get(kind, choice) if isinstance(kind, str) else choice


class ToolName(BaseModel):
    name: str


class NamedTool(Options):
    """A function that the model may or must call."""

    type: Literal["function"] = "function"
    function: ToolName


class ToolChoices(BaseModel):
    mode: Literal["auto", "required"]
    tools: Items[Annotated[NamedTool, BeforeValidator(as_named_function)]] = Field(min_length=1)


class AllowedTools(BaseModel):
    """The subset of the tools that the model may call."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolChoices

    @property
    def names(self) -> set[str]:
        """Names of the allowed functions."""
        return {tool.function.name for tool in self.allowed_tools.tools}


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools, BeforeValidator(as_named_function)
]  # fmt: skip


class Thinking(Options):
    """Whether the model reasons before it answers, in the form of Anthropic's and DeepSeek's APIs."""

    model_config = ConfigDict(extra="allow")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class ReasoningChoice(Options):
    """How much the model reasons, in OpenRouter's form."""

    effort: str | None = Field(None, max_length=64)
    enabled: bool | None = None
    max_tokens: Count | None = None


_PARAMETERS = frozenset(
    {"self", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "add_special_tokens", "fits",
     "places", "previous_token_ids"}
)  # fmt: skip
"""Parameters of the functions that render and encode a conversation, including the template, which is a program."""


def _only_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _PARAMETERS:
            raise ValueError(f"requests may not set the chat template variable {name!r}")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_only_variables)]


class PromptCacheOptions(Options):
    """How long the prefixes that `prompt_cache_breakpoint` marks are kept."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: str | None = None


class ChatRequest(GenerationRequest):
    """A conversation to continue."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = Field(None, description="The new name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=1024)
    tools: Items[AnyTool] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto, required (the model must call a function), or the function to call."
    )
    parallel_tool_calls: bool = Field(True, description="False allows at most one call.")
    prompt_cache_options: PromptCacheOptions | None = Field(
        None, description="Options of the marks prompt_cache_breakpoint on parts of messages."
    )
    include_reasoning: bool = Field(True, description="False omits the reasoning from the response.")
    reasoning_effort: str | None = Field(
        None, max_length=64, description="A variable of the chat template; none also sets enable_thinking to false."
    )
    enable_thinking: bool | None = Field(None, description="A variable of the chat template.")
    thinking: Thinking | None = Field(None, description="Type disabled sets enable_thinking to false.")
    reasoning: ReasoningChoice | None = Field(None, description="Other names of reasoning_effort and of the budget.")
    thinking_token_budget: Count | None = Field(
        None, description="Maximum number of reasoning tokens; the server then ends the reasoning."
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="The output continues the last message.")
    previous_token_ids: TokenIds | None = Field(
        None,
        description="The conversation so far, prompt and answer, as return_token_ids returned it: it is not rendered "
        "again, and messages are only those that follow.",
    )
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables of the chat template.")
    documents: Items[dict[str, Any]] | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the request switches reasoning on or off; None if it does not say."""
        kind, effort = self.thinking and self.thinking.type, self.reasoning and self.reasoning.effort
        if "none" in (self.reasoning_effort, effort) or kind == "disabled":
            return False
        return self.reasoning.enabled if self.enable_thinking is None and self.reasoning else self.enable_thinking

    @property
    def thinking_budget(self) -> int | None:
        """Maximum number of reasoning tokens."""
        if self.thinking_token_budget is not None:
            return self.thinking_token_budget
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return self.thinking.budget_tokens
        return self.reasoning.max_tokens if self.reasoning is not None else None

    @model_validator(mode="after")
    def _refuse(self) -> ChatRequest:
        for name in ("echo", "prompt_logprobs"):
            value = (self.model_extra or {}).get(name)
            if value is not None and value is not False:
                raise refusal(name, f"{name} is not supported here: use /v1/completions")
        last = self.messages[-1]
        if last.role == "assistant" and True in ((last.model_extra or {}).get(name) for name in ("prefix", "partial")):
            self.continue_final_message, self.add_generation_prompt = True, False
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs needs logprobs=true")
        known = {tool.function.name for tool in self.tools or ()}
        match self.tool_choice:
            case "required" if not known:
                raise refusal("tool_choice", "tool_choice is required but tools is empty")
            case NamedTool() as choice if choice.function.name not in known:
                raise refusal("tool_choice", f"tool_choice: there is no tool {choice.function.name!r}")
            case AllowedTools() as choice if not choice.names <= known:
                raise refusal("tool_choice", f"tool_choice: there is no tool {min(choice.names - known)!r}")
        explicit = "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and explicit and self.add_generation_prompt:
            raise refusal("continue_final_message", "continue_final_message needs add_generation_prompt=false")
        if self.continue_final_message and self.previous_token_ids:
            raise refusal("previous_token_ids", "previous_token_ids cannot be combined with continue_final_message")
        if self.max_tokens == 0 or self.max_completion_tokens == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise refusal(name, f"{name} must be at least 1")
        return self


class ConvertedRequest(TextRequest):
    """A request in the format of another API. Fields that it does not define mean the same as in `ChatRequest`."""

    @property
    def chat_fields(self) -> dict[str, Any]:
        """The fields with a name of `ChatRequest`; a caller converts those with another meaning or form."""
        return {name: value for name, value in self if name in ChatRequest.model_fields}

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have no effect."""
        return [name for name in super().ignored if name not in ChatRequest.model_fields]

    @model_validator(mode="after")
    def _refuse_several_answers(self) -> ConvertedRequest:
        if (self.model_extra or {}).get("n") not in (None, 1):
            raise refusal("n", "n is not supported: this API returns one answer")
        return self


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class CalledFunction(BaseModel):
    name: str | None = None
    arguments: str = Field(default="", description="A JSON object, as text; in an event, new text of it.")


class ToolCall(BaseModel):
    """A function call by the model, or new output of one: its first event has the id and the name."""

    index: int | None = Field(default=None, description="Only in events.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatAnswer(BaseModel):
    """The model's message, or new output of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = Field(default=None, description="The reasoning before the answer.")
    reasoning: str | None = Field(default=None, description="Alias of reasoning_content.")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    message: ChatAnswer | None = None
    delta: ChatAnswer | None = Field(default=None, description="Only in events, instead of message.")
    logprobs: ChatLogprobs | None = None


class ChatResponse(ChoicesResponse):
    """A response, or one event of a stream."""

    object: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
