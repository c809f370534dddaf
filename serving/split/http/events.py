"""`/internal/events`: the states that this server can continue from, for routers; docs/split.md defines the format.

A stream starts with a snapshot, followed by changes. The server stores only a reader's position in the journal's log. A
reader that is too slow gets the event `behind`, and must start again with a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.responses import Response

from serving.api.http.connection.streaming import EventStream, until_gone
from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.core.tiers.journal import Event, Journal
from serving.split.http.routes import PromptRequest, prompt_of, sealed
from serving.split.seal import Seal
from serving.split.wire import Tokens

MOST_READERS = 16
_LOOK = 0.05  # seconds between polls of the journal
_BEAT = 5.0  # seconds without events after which a stream sends a keep-alive comment
_AT_ONCE = 512  # maximum number of states in one message


def events_router(journal: Journal, *, model: str, seal: Seal | None = None) -> APIRouter:
    """Returns the endpoints for routers. `model`: digest of the weights; `seal` authenticates messages."""
    router = APIRouter(prefix="/internal", tags=["routing"], dependencies=[sealed(seal or Seal())])
    places = asyncio.Semaphore(MOST_READERS)

    @router.get("/events")
    async def events(request: Request) -> Response:
        """An endless stream of server-sent events."""
        if places.locked():
            raise ApiError(503, f"{MOST_READERS} readers already follow this server", code="too_many_readers")
        ending: Callable[[], bool] = getattr(request.app.state, "ending", lambda: False)

        async def counted() -> AsyncGenerator[bytes, None]:
            if places.locked():
                return  # other readers started meanwhile
            async with places:
                async for message in follow(journal, model, ending):
                    yield message

        return EventStream(counted())

    @router.post("/tokens", response_model=Tokens)
    async def tokens(body: PromptRequest, request: Request) -> Tokens:
        """A prompt's tokens, salt and adapter, from which the names in events are computed."""
        context = context_of(request)
        work = prompt_of(context, body.kind, body.body, request.headers)
        prompt, run = await until_gone(request.receive, work)
        table = context.engine.engine.adapters if run.lora_request is not None else None
        adapter = table.names.digest(run.lora_request) if table is not None else None
        return Tokens(tokens=prompt, salt=run.cache_salt, adapter=adapter)

    return router


async def follow(journal: Journal, model: str, ending: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Yields the messages of one stream, until the server ends or the reader is too slow."""
    snapshot = journal.snapshot()
    number = snapshot.number
    head = {"model": model, "block": journal.block, "weights": snapshot.weights}
    yield _message("snapshot", number, head | {"states": len(snapshot.states)})
    for at in range(0, len(snapshot.states), _AT_ONCE):
        for message in _states("held", snapshot.states[at : at + _AT_ONCE]):
            yield message
    del snapshot
    last_sent = time.monotonic()
    while not ending():
        events = journal.since(number)
        if events is None:
            yield _message("behind", number, {})
            return
        for message in _states("stored", events):
            yield message
        if events:
            number, last_sent = events[-1].number, time.monotonic()
        elif time.monotonic() - last_sent > _BEAT:
            last_sent = time.monotonic()
            yield b": here\n\n"
        if len(events) < _AT_ONCE:
            await asyncio.sleep(_LOOK)


def _states(kind: str, events: Iterable[Event]) -> Iterator[bytes]:
    """Joins consecutive events of the same kind and tier to one message with the number of the last one. `kind`: of
    events of stored states."""
    for (stored, tier), some in groupby(events, key=lambda event: (event.stored, event.tier)):
        same = list(some)
        rows: list[Any] = [event.state.name.hex() for event in same]
        if stored:
            rows = [[event.state.name.hex(), event.state.link.hex(), *event.state[2:]] for event in same]
        yield _message(kind if stored else "evicted", same[-1].number, {"tier": tier, "states": rows})


def _message(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\nid: {number}\ndata: ".encode() + to_json(fields) + b"\n\n"
