"""`/internal/events`: what this server could go on from, for routers; docs/split.md has the format.

A stream begins with a snapshot and goes on with what changes. Nothing is kept for a reader but its place in the
journal's log, so one that cannot keep up is told so and cut off, and begins again with a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json
from starlette.responses import Response

from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.api.http.streaming import EventStream, until_gone
from serving.core.tiers.content import State
from serving.core.tiers.journal import Event, Journal
from serving.split.http.prompts import Kind, prompt_of
from serving.split.http.sealed import sealed
from serving.split.seal import Seal
from serving.split.wire import Tokens

MOST_READERS = 16
_LOOK = 0.05
"""Seconds between two looks at the journal."""
_BEAT = 5.0
"""Seconds after which a stream says that it is still there."""
_AT_ONCE = 512
"""States of one message."""


class PromptRequest(BaseModel):
    """A request whose tokens are wanted."""

    model_config = ConfigDict(extra="ignore")

    kind: Kind
    body: dict[str, Any]


def events_router(journal: Journal, *, model: str, seal: Seal | None = None) -> APIRouter:
    """The endpoints for routers. `model` is a digest of the weights. Only messages with `seal` count."""
    router = APIRouter(prefix="/internal", tags=["routing"], dependencies=[sealed(seal or Seal())])
    readers = 0

    @router.get("/events")
    async def events(request: Request) -> Response:
        """A stream of server-sent events, without an end."""
        nonlocal readers
        if readers >= MOST_READERS:
            raise ApiError(503, f"{MOST_READERS} readers follow this server already", code="too_many_readers")
        ending: Callable[[], bool] = getattr(request.app.state, "ending", lambda: False)

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal readers
            if readers >= MOST_READERS:
                return  # others have begun since it was let in
            readers += 1
            try:
                async for message in follow(journal, model, ending):
                    yield message
            finally:
                readers -= 1

        return EventStream(counted())

    @router.post("/tokens", response_model=Tokens)
    async def tokens(body: PromptRequest, request: Request) -> Tokens:
        """A prompt's tokens, and the salt of its cache: what names in events are made of."""
        found = await until_gone(request.receive, prompt_of(context_of(request), body.kind, body.body, request.headers))
        return Tokens(tokens=found.tokens, salt=found.salt)

    return router


async def follow(journal: Journal, model: str, ending: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """The messages of one stream, until the server ends or its reader is too slow."""
    found = journal.snapshot()
    number = found.number
    head = {"server": journal.id, "model": model, "block": journal.block, "weights": found.weights}
    yield _message("snapshot", number, head | {"states": len(found.states)})
    for at in range(0, len(found.states), _AT_ONCE):
        for message in _by_tier("held", number, found.states[at : at + _AT_ONCE]):
            yield message
    del found
    said = time.monotonic()
    while not ending():
        events = journal.since(number)
        if events is None:
            yield _message("behind", number, {})
            return
        for message in _changes(events):
            yield message
        if events:
            number, said = events[-1].number, time.monotonic()
        elif time.monotonic() - said > _BEAT:
            said = time.monotonic()
            yield b": here\n\n"
        if len(events) < _AT_ONCE:
            await asyncio.sleep(_LOOK)


def _changes(events: Iterable[Event]) -> Iterator[bytes]:
    """Neighbours that say the same of the same tier go in one message, which has the number of the last."""
    for (stored, _), some in groupby(events, key=lambda event: (event.stored, event.tier)):
        same = list(some)
        states = [(event.tier, event.state) for event in same]
        yield from _by_tier("stored" if stored else "evicted", same[-1].number, states)


def _by_tier(kind: str, number: int, states: Iterable[tuple[str, State]]) -> Iterator[bytes]:
    for tier, some in groupby(states, key=lambda each: each[0]):
        if kind == "evicted":
            yield _message(kind, number, {"tier": tier, "states": [state.name.hex() for _, state in some]})
        else:
            told = [[state.name.hex(), state.link.hex(), state.tail, state.position] for _, state in some]
            yield _message(kind, number, {"tier": tier, "states": told})


def _message(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\nid: {number}\ndata: ".encode() + to_json(fields) + b"\n\n"
