"""`/v1/messages`, Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.api.http.protocol.chat import ConvertedRequest, Thinking
from serving.api.http.protocol.common import MAX_STOP_TEXTS, Int32, Items, WholeAnswer

Parts = Items[dict[str, Any]]


class InputMessage(BaseModel):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts | None = None


class ClientTool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolUse(BaseModel):
    """Whether the model must call a function, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())
    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="allow")
    format: OutputFormat | None = None
    effort: str | None = Field(None, max_length=64)


class Conversation(ConvertedRequest):
    """A conversation for the model."""

    messages: Items[InputMessage] = Field(min_length=1)
    system: str | Parts | None = None
    tools: Items[ClientTool] | None = None
    tool_choice: ToolUse | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="An older name of the format in output_config.")
    cache_control: dict[str, Any] | None = Field(None, description="Marks the last block.")


class MessagesRequest(Conversation):
    """A conversation to continue. Other fields have the meaning that they have in `/v1/chat/completions`."""

    max_tokens: int = Field(ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int32 | None = None
    stop_sequences: Annotated[Items[str], Field(max_length=MAX_STOP_TEXTS)] | None = None


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingBlock(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheCreation(BaseModel):
    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessagesUsage(BaseModel):
    """Token counts; `input_tokens` excludes tokens found in the prefix cache, and those added to it up to marks."""

    input_tokens: int
    cache_creation: CacheCreation
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(WholeAnswer):
    """A response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(WholeAnswer):
    input_tokens: int
