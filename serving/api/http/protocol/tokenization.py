"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from serving.api.http.protocol.chat import Message, TemplateVariables, Tool
from serving.api.http.protocol.common import Items, RequestModel, TokenIds, refusal


class TokenizeRequest(RequestModel):
    """A text or a conversation to tokenise."""

    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Unset: true for texts, false for conversations.")
    add_generation_prompt: bool = True
    tools: Items[Tool] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "exactly one of prompt and messages must be set")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """The tokenizer. `chat_template` is the default of `chat_templates`."""

    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    chat_template: str | None
    chat_templates: dict[str, str]


class DetokenizeRequest(RequestModel):
    """Token ids to convert to text."""

    tokens: TokenIds


class DetokenizeResponse(BaseModel):
    prompt: str
