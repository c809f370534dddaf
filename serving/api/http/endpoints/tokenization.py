"""`/tokenize`, `/detokenize`, `/tokenizer_info`, what prompts are rendered to, and the counts of `/v1/messages` and
`/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.text_api import TEXT_APIS
from serving.api.http.connection.keys import sent_key
from serving.api.http.connection.streaming import answer, encoded, ignored_header, listed
from serving.api.http.context import context_of
from serving.api.http.errors import ApiError, validated
from serving.api.http.protocol.chat import AnyTool, ChatRequest, ConvertedRequest, Message, TemplateVariables
from serving.api.http.protocol.common import Items, RequestModel, TokenIds, refusal
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.protocol.messages import Conversation, TokenCount
from serving.api.http.protocol.responses import InputTokens, ResponsesRequest
from serving.api.http.text import TextCodec

router = APIRouter()


class TokenizeRequest(RequestModel):
    """A text or a conversation to tokenize."""

    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Unset: true for texts, false for conversations.")
    add_generation_prompt: bool = True
    tools: Items[AnyTool] | None = None
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


class RenderedPrompt(BaseModel):
    """One prompt as the engine gets it, in vLLM's form."""

    request_id: str
    token_ids: list[int]
    model: str
    stream: bool
    priority: int
    cache_salt: str | None


@router.post("/tokenize", response_model=TokenizeResponse, tags=["tokens"])
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or a conversation."""
    context = context_of(request)
    context.check(body.model)
    codec = context.codec
    if body.messages is not None:
        chat = validated(ChatRequest, body.model_dump(exclude_unset=True, exclude={"prompt", "return_token_strs"}))
        (ids,), _ = await tokenized(context.of_request(body.model, None), chat, fits=False)
    else:
        assert body.prompt is not None
        (ids,) = await codec.encode([body.prompt], add_special_tokens=body.add_special_tokens is not False, fits=False)
    count, most = len(ids), context.engine.engine.max_model_len
    request.state.reserve(16 * count)
    result = TokenizeResponse.model_construct(count=count, max_model_len=most, tokens=_listed(ids))
    if body.return_token_strs:
        result.token_strs = listed(count, lambda begin, end: [*map(codec.token, ids[begin:end])], 1)
    return await _in_parts(codec, result, ignored_header(body))


@router.post("/detokenize", response_model=DetokenizeResponse, tags=["tokens"])
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, including special tokens."""
    context = context_of(request)
    context.check(body.model)
    size = context.engine.engine.vocab_size
    bad = next((token for token in body.tokens if token >= size), None)
    if bad is not None:
        raise ApiError(400, f"token id {bad} is not in the vocabulary (0 to {size - 1})", param="tokens")
    text = await context.codec.decode(body.tokens)
    request.state.reserve(4 * len(text))
    result = DetokenizeResponse.model_construct(prompt=text)
    return await _in_parts(context.codec, result, ignored_header(body))


@router.post("/v1/completions/render", response_model=list[RenderedPrompt], tags=["tokens"])
async def render_completion(body: CompletionRequest, request: Request) -> Response:
    """Token ids of each prompt of a request to `/v1/completions`, for routers that choose a server by them."""
    return await _rendered(body, request, slice(None))


@router.post("/v1/chat/completions/render", response_model=RenderedPrompt, tags=["tokens"])
async def render_chat(body: ChatRequest, request: Request) -> Response:
    """Token ids of a request to `/v1/chat/completions`, for routers that choose a server by them."""
    return await _rendered(body, request, 0)


def _listed(ids: list[int]) -> Any:
    return listed(len(ids), lambda begin, end: ids[begin:end], 1)


async def _in_parts(codec: TextCodec, result: Any, headers: Mapping[str, str] | None = None) -> Response:
    parts = [part async for part in encoded(codec.run, result)]
    return Response(b"".join(parts), headers=headers, media_type="application/json")


async def _rendered(body: ChatRequest | CompletionRequest, request: Request, which: int | slice) -> Response:
    context, number = context_of(request), request.state.request_id
    context.check(body.model)
    own = replace(context.of_request(body.model, sent_key(request.headers)), marks=False)
    prompts, _ = await tokenized(own, body)
    rendered: Any = [
        RenderedPrompt.model_construct(
            request_id=f"{number}-{at}", token_ids=_listed(prompt), model=own.model,
            stream=body.stream, priority=body.priority, cache_salt=body.cache_salt,
        )
        for at, prompt in enumerate(prompts)
    ]  # fmt: skip
    return await _in_parts(context.codec, rendered[which])


@router.post("/v1/messages/count_tokens", response_model=TokenCount, tags=["Anthropic"])
async def count_tokens(body: Conversation, request: Request) -> Response:
    """Number of tokens of a conversation, including its tools."""
    return answer(TokenCount(input_tokens=await _count("messages", body, request)))


@router.post("/v1/responses/input_tokens", response_model=InputTokens, tags=["OpenAI"])
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Number of tokens of the input of a request to `/v1/responses`."""
    return answer(InputTokens(input_tokens=await _count("responses", body, request)))


async def _count(kind: str, body: ConvertedRequest, request: Request) -> int:
    context = context_of(request)
    context.check(body.model)
    own = context.of_request(body.model, sent_key(request.headers))
    chat = TEXT_APIS[kind].converted(body, own.conversation)
    (prompt,), _ = await tokenized(own, chat, fits=False)
    return len(prompt)


@router.get("/tokenizer_info", response_model=TokenizerInfo, tags=["tokens"])
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's vocabulary size, special tokens and chat templates."""
    context = context_of(request)
    tokenizer = context.codec.tokenizer
    if tokenizer is None:
        raise ApiError(404, "this model has no tokenizer: send prompts as token ids", code="no_tokenizer")
    templates, longest = tokenizer.chat_templates, context.engine.engine.max_model_len
    return answer(TokenizerInfo(
        vocab_size=tokenizer.vocab_size, model_max_length=longest, special_tokens=tokenizer.special_tokens,
        chat_template=templates.get("default"), chat_templates=templates,
    ))  # fmt: skip
