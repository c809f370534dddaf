"""`kv_transfer_params` of `/v1/*`: how routers of other projects split a request, as with vLLM's workers.

The router sends a request to a prefill worker with `do_remote_decode`, and gets a ticket instead of an answer. Then it
sends the request to a decode worker with what it got. Clients' requests are not sealed, so the ticket is signed with
the fleet's secret. A request whose state is not available is computed on the decode worker, or fails, by its
`--on-failure`.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.responses import Response

from serving.api.http.context import Transfer
from serving.api.http.errors import ApiError
from serving.split.seal import Seal
from serving.split.wire import FailurePolicy, Ticket

log = logging.getLogger(__name__)

NAME = "mamba_jax_ticket"
_PLACE = "v1/kv_transfer_params"  # of the code
_OBJECTS = {"completions": "text_completion", "chat/completions": "chat.completion"}


def signed(seal: Seal, ticket: Ticket) -> dict[str, Any]:
    """Returns a ticket as `kv_transfer_params` of the request to a decode worker."""
    text = ticket.model_dump_json()
    return {"do_remote_prefill": True, "do_remote_decode": False, NAME: [seal.code("", _PLACE, text.encode()), text]}


def ticket_of(seal: Seal, given: Any) -> Ticket | None:
    """Returns the ticket in `kv_transfer_params`; None without one.

    Raises:
        ApiError: 400: it is malformed, or has not been signed with the fleet's secret.
    """
    if not isinstance(given, dict) or given.get(NAME) is None:
        return None
    try:
        code, text = map(str, given[NAME])
        if hmac.compare_digest(code.encode(), seal.code("", _PLACE, text.encode()).encode()):
            return Ticket.model_validate_json(text)
    except (TypeError, ValueError, ValidationError):
        pass
    raise ApiError(400, f"{NAME} was not signed with this fleet's secret", param="kv_transfer_params")


def prefilling(seal: Seal, compute: Callable[[str, Request], Awaitable[Ticket]]) -> Transfer:
    """Returns what a prefill worker does with requests to `/v1/*`. `compute`: computes a prompt and holds its state."""

    async def transfer(kind: str, prompts: int, given: Any, request: Request) -> Response | None:
        if not isinstance(given, dict) or not given.get("do_remote_decode"):
            return None
        params, tokens, cached = dict[str, Any](), 0, 0
        if prompts == 1:  # the decode worker computes others itself
            try:
                ticket = await compute(kind, request)
                params, tokens, cached = signed(seal, ticket), len(ticket.prompt_token_ids), ticket.cached_tokens
            except ApiError as error:
                if error.code not in ("too_many_states", "too_late"):
                    raise
                log.warning("the decode worker computes a prompt: %s", error.message)
        answer = {
            "id": f"prefill-{request.state.request_id}",
            "object": _OBJECTS.get(kind, kind),
            "created": int(time.time()),
            "choices": [],
            "usage": {
                "prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "kv_transfer_params": params,
        }  # fmt: skip
        return Response(to_json(answer), media_type="application/json")

    return transfer


def decoding(seal: Seal, expect: Callable[[Ticket, Request], Awaitable[bool]], policy: FailurePolicy) -> Transfer:
    """Returns what a decode worker does with requests to `/v1/*`. `expect`: announces a state to the engine."""

    async def transfer(kind: str, prompts: int, given: Any, request: Request) -> Response | None:
        ticket = ticket_of(seal, given)
        if ticket is not None and ticket.position and prompts == 1:
            try:
                await expect(ticket, request)
            except ApiError as error:
                if policy == "fail":
                    raise
                log.warning("prefill worker %s: %s", ticket.worker[:200], error.message)
        return None

    return transfer
