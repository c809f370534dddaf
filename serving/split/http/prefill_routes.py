"""Endpoints of a prefill worker: compute a prompt, and offer its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, Field
from starlette.datastructures import Headers

from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.stored_responses import stored_conversation
from serving.api.http.apis.text_api import TEXT_APIS
from serving.api.http.connection.keys import salt_of, sent_key
from serving.api.http.connection.streaming import until_gone
from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError, validated
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.split.http.offering import add_offering, repeat, role_router, sweeping, worker_errors
from serving.split.prefill_side import ONCE, Export, PrefillSide, fed_tokens, ticket_of
from serving.split.seal import Seal
from serving.split.wire import Handoff, Ticket

log = logging.getLogger(__name__)


def _known(kind: str) -> str:
    if kind not in TEXT_APIS:
        raise ValueError(f"must be one of {', '.join(TEXT_APIS)}")
    return kind


ApiKind = Annotated[str, AfterValidator(_known)]
"""The path below `/v1/`, a key of `TEXT_APIS`."""


class WorkerPrompt(NamedTuple):
    """A request's prompt, priority, cache salt and adapter, without sampling parameters."""

    tokens: list[int]
    priority: int
    salt: str | None
    lora: LoRARequest | None = None


async def prompt_of(context: Context, kind: str, body: dict[str, Any], headers: Headers) -> WorkerPrompt:
    """Returns the prompt of a request. `headers`: the client's.

    Raises:
        ApiError, RequestError, RequestValidationError: the request is invalid, or has several prompts.
    """
    api = TEXT_APIS[kind]
    parsed = validated(api.request, body)
    context.check(parsed.model)
    own = context.of_request(parsed.model, sent_key(headers))
    request = api.converted(parsed, stored_conversation(own))
    prompts = await tokenized(own, request)
    if len(prompts) != 1:
        raise ApiError(400, "prefill workers accept only one prompt per request", param="prompt")
    salt = salt_of(request.cache_salt, headers, context.settings)
    return WorkerPrompt(prompts[0], request.priority, salt, context.adapter_of(parsed.model))


class PromptRequest(BaseModel):
    """A client's request, whose prompt is to be tokenized."""

    kind: ApiKind
    body: dict[str, Any]


class PrefillRequest(PromptRequest):
    """A request to a decode worker, whose prompt is to be computed."""

    handoff: Handoff = "full"
    seconds: float = Field(600.0, gt=0)
    """Maximum seconds to compute the prompt; the router does not wait longer."""


def prefill_router(side: PrefillSide, url: str, *, seal: Seal | None = None) -> APIRouter:
    """Returns the endpoints of one prefill worker, which others reach at `url`. `seal` authenticates messages."""

    def status() -> dict[str, Any]:
        return {"role": "prefill", "kept": side.kept} | asdict(side.stats)

    router = role_router(side.worker, seal or Seal(), status, [sweeping(side)])
    add_offering(router, side, url)

    @router.post("/prefill", response_model=Ticket)
    async def prefill(body: PrefillRequest, request: Request) -> Ticket:
        """Compute a prompt, and hold its state until it is fetched or its lease expires."""
        context = context_of(request)
        with worker_errors("a decode worker"):
            return await until_gone(request.receive, _prefill(context, side, body, url, request.headers))

    return router


async def _prefill(context: Context, side: PrefillSide, body: PrefillRequest, url: str, headers: Headers) -> Ticket:
    prompt, priority, salt, lora = await prompt_of(context, body.kind, body.body, headers)
    fed = fed_tokens(prompt, body.handoff)
    if not fed:
        return ticket_of(side, None, prompt, body.handoff, worker=url)
    engine, id, name = context.engine, secrets.token_hex(16), f"prefill-{uuid.uuid4().hex}"
    last: RequestOutput | None = None
    # A lease is renewed while its prompt waits or is computed.
    beating = asyncio.create_task(repeat(engine, side.lease / 4, lambda: side.renew([id])))
    try:
        async with asyncio.timeout(body.seconds):
            export: Export = await engine.call(lambda _: side.begin(id))
            run = EngineRequest(name, {"prompt_token_ids": fed}, ONCE, priority, salt, export=export, lora_request=lora)
            async with contextlib.aclosing(engine.stream(run)) as each:
                async for output in each:
                    last = output
        assert last is not None
    except BaseException as error:
        # The request was refused, aborted or too late, or the router disconnected, so no worker will fetch the state.
        # Commands run in order, so the release follows `begin` even if `begin` has not run yet.
        engine.tell(lambda _: side.release(id, wanted=False))
        if isinstance(error, TimeoutError):
            raise ApiError(503, "the prompt was not computed in time", code="too_late") from None
        raise
    finally:
        beating.cancel()
    return ticket_of(
        side, export, prompt, body.handoff,
        worker=url, cached_tokens=last.num_cached_tokens, adapter_name=None if lora is None else lora.lora_name,
    )  # fmt: skip
