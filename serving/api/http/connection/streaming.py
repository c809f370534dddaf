"""Responses as JSON and as server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.api.http.errors import ApiError, as_api_error
from serving.api.http.protocol.common import RequestModel, WholeAnswer

log = logging.getLogger(__name__)

T = TypeVar("T")
Run = Callable[[int, Callable[[], bytes]], Awaitable[bytes]]

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""An event that clients ignore."""
_FIRST_EVENT_SECONDS = 0.5
"""Time in which a refused request gets its own status."""
_IGNORED, _MOST_IGNORED = "x-ignored-fields", 16
_PART_VALUES = 1200
"""Numbers that are made and encoded at once, which takes a millisecond or two; at least one item of a list."""
_LONG, _ITEM_VALUES = 256, 20
"""Lists with more items are encoded in parts; if an item has more numbers than these, shorter ones, too."""
_SENT = 1 << 16
"""Bytes that are sent at once, at least."""
_PIECE = 1 << 14
"""Size of one part for `run`: making a part takes about as long as tokenizing so many characters. `run` does not count
it as a long text."""


def json_of(model: Any) -> bytes:
    """Returns a response as JSON, with the fields that were set, or with all fields of a `WholeAnswer`."""
    return b"".join(json_parts(model, exclude_unset=not isinstance(model, WholeAnswer)))


async def encoded(run: Run, model: Any, before: bytes = b"", after: bytes = b"") -> AsyncGenerator[bytes, None]:
    """Yields a response (a model or a list of models) as JSON between other bytes: a long one in parts that are made in
    a thread.

    `run`: calls a function that processes so many characters; see `TextCodec.run`.
    """
    if not is_long(model):
        yield before + json_of(model) + after
        return
    parts = json_parts(model, exclude_unset=not isinstance(model, WholeAnswer))
    pieces = itertools.chain((before,), parts, (after,))
    while piece := await run(_PIECE, partial(next_bytes, pieces)):
        yield piece


def answer(model: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the HTTP response with this content."""
    return Response(json_of(model), headers=headers, media_type="application/json")


def ignored_header(request: RequestModel, more: Sequence[str] = ()) -> dict[str, str]:
    """Returns a header with the names of fields without effect, and `more` names. Clients choose the names, so the
    header lists only harmless ones."""
    names = [name for name in (*request.ignored, *more) if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {_IGNORED: ",".join(names[:_MOST_IGNORED])} if names else {}


class ClientGone(Exception):
    """The client has disconnected."""


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns one event with a name, which is also its `type`."""
    return f"event: {name}\n".encode() + b"data: " + to_json({"type": name, **fields}) + b"\n\n"


PING = named_event("ping", {})
"""An event of Anthropic's API that clients ignore."""


def openai_failure(error: ApiError) -> bytes:
    """Returns the last events of a failed stream, in OpenAI's format."""
    return b"data: " + error.body() + b"\n\n" + DONE


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Cancels `work`, and raises `ClientGone`, if the client disconnects first."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Sends events as they arrive, until they end or the client disconnects. Closes `events` in both cases.

    An error after the first event can no longer change the status; `failure` converts it to an event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        failure: Callable[[ApiError], bytes] = openai_failure,
        media_type: str = "text/event-stream",
    ) -> None:
        # Proxies must not cache or buffer events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(_ended_by(failure, events), headers=headers, media_type=media_type)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self.stream_response(send))
        except (ClientGone, OSError):
            log.debug("the client disconnected during a stream")
        finally:
            await self._events.aclose()


async def _ended_by(
    failure: Callable[[ApiError], bytes], events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in events:
            yield piece
    except Exception as error:
        yield failure(as_api_error(error))


async def start(
    events: AsyncGenerator[bytes, None], keep_alive: bytes = COMMENT, interval: float = 10.0
) -> AsyncGenerator[bytes, None]:
    """Waits a moment for the first event, so that a refused request gets its own status. Returns all events.

    Until the first event, `keep_alive` is sent at once and then every `interval` seconds, or never if that is 0:
    clients and proxies close a connection without data while a request waits or its prompt is computed.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=_FIRST_EVENT_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        await _cancel(first)
        await events.aclose()
        raise

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        try:
            while not first.done():
                if interval:
                    yield keep_alive
                await asyncio.wait({first}, timeout=interval or None)
            yield first.result()
            async for piece in events:
                yield piece
        finally:
            await _cancel(first)
            await events.aclose()

    return all_of_them()


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields items of several streams as they arrive, with the index of their stream. The first error ends all
    streams."""
    if len(streams) == 1:  # nearly always; a task and a queue would double the cost of an item
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            match await queue.get():
                case None:
                    left -= 1
                case Exception() as error:
                    raise error
                case pair:
                    yield pair
    finally:
        await _cancel(*tasks)


class ListInParts(NamedTuple):
    """A long list of a response. Its items are made when it is sent, a few at a time."""

    length: int
    part: Callable[[int, int], list[Any]]
    """Returns the items from one place up to another."""
    step: int
    """Number of items that are made at once."""


def listed(length: int, part: Callable[[int, int], list[Any]], values: int = _ITEM_VALUES) -> Any:
    """Returns a list for a field of a response, whose items have so many `values`: as it is if it is short, otherwise a
    `ListInParts`."""
    values = max(values, _ITEM_VALUES)
    if length * values <= _LONG * _ITEM_VALUES:
        return part(0, length)
    return ListInParts(length, part, max(1, _PART_VALUES // values))


def is_long(value: Any) -> bool:
    """Returns whether a response, or a part of one, should be encoded in parts."""
    match value:
        case ListInParts():
            return True
        case str():
            return len(value) > _SENT
        case BaseModel():
            return any(map(is_long, vars(value).values()))
        case [BaseModel(), *_]:
            return len(value) > _LONG or any(map(is_long, value))
    return False


def json_parts(value: Any, *, exclude_unset: bool) -> Iterator[bytes]:
    """Yields the JSON text of a response. Making each part takes a bounded time: about `_PART_VALUES` numbers."""
    match value:
        case ListInParts():
            places = range(0, value.length, value.step)
            items = (value.part(begin, min(begin + value.step, value.length)) for begin in places)
            yield from _joined(b"[]", ([to_json(part)[1:-1]] for part in items))
        case str() if is_long(value):
            yield b'"'
            yield from (to_json(value[begin : begin + _SENT])[1:-1] for begin in range(0, len(value), _SENT))
            yield b'"'
        case [BaseModel(), *_]:
            yield from _joined(b"[]", (json_parts(item, exclude_unset=exclude_unset) for item in value))
        case BaseModel() if is_long(value):
            names = value.model_fields_set if exclude_unset else type(value).model_fields
            parts = (json_parts(getattr(value, name), exclude_unset=exclude_unset) for name in names)
            fields = (itertools.chain([to_json(name) + b":"], part) for name, part in zip(names, parts, strict=True))
            yield from _joined(b"{}", fields)
        case BaseModel():
            yield value.model_dump_json(exclude_unset=exclude_unset, by_alias=True).encode()
        case _:
            yield to_json(value)


def _joined(brackets: bytes, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield brackets[:1]
    for place, item in enumerate(items):
        yield from item if not place else itertools.chain([b","], item)
    yield brackets[1:]


def next_bytes(parts: Iterator[bytes]) -> bytes:
    """Returns the next parts together, as many as are sent at once; empty at the end."""
    found = bytearray()
    for part in parts:
        found += part
        if len(found) >= _SENT:
            break
    return bytes(found)
