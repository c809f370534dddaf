"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.api.http.errors import ApiError, as_api_error

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has disconnected."""


def event(model: BaseModel) -> bytes:
    """One event. Only fields that were set are written."""
    return b"data: " + model.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """One event with a name, which is its `type`, too."""
    return f"event: {name}\n".encode() + b"data: " + to_json({"type": name, **fields}) + b"\n\n"


def openai_failure(error: ApiError) -> bytes:
    """The end of a stream that has failed, in OpenAI's form."""
    return b"data: " + error.body() + b"\n\n" + DONE


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises:
        ClientGone: it has.
    """
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


class EventStream(Response):
    """Sends events as they come, until they end or the client goes; either way `events` is closed.

    An error after the first event can no longer change the status: it becomes an event of its own, as `failure` writes
    it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        failure: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        # Proxies must neither cache nor collect what is meant to arrive at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._failure = events, failure or openai_failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        except (ClientGone, OSError):
            log.debug("the client has left a stream")
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            body = self._failure(as_api_error(error))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def start(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Waits for the first event, so that whatever is refused is refused with its own status; then gives all."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        try:
            yield first
            async for piece in events:
                yield piece
        finally:
            await events.aclose()

    return all_of_them()


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, with the index of their stream. The first error ends all of them."""
    if len(streams) == 1:  # nearly always; a task and a queue in between would cost as much as all the rest
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
                case found:
                    yield found
    finally:
        await _cancel(*tasks)


async def gather(work: Sequence[Awaitable[T]]) -> list[T]:
    """Results in order; the first error cancels the rest, and is raised only when they have ended."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel(*tasks)
