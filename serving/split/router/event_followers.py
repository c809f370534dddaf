"""The states that workers can continue from, according to their routing events (`serving.split.http.events`).

If a stream ends, times out or is malformed, what it reported is discarded, and it is started again with a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic_core import from_json

from serving.core.cache.content import SIZE, Chain, Name, Scope, State
from serving.core.tiers.journal import Directory, Resumable
from serving.split.router.workers import Fleet, Remote

log = logging.getLogger(__name__)

_PATH = "/internal/events"
_SILENCE = 20.0  # seconds without data after which a stream counts as broken; servers send data every five seconds
_AGAIN = 2.0  # seconds before reconnecting to a stream that ended; doubled after each connection without a snapshot
_MAX_PAUSE = 60.0  # maximum seconds before reconnecting
_LONGEST = 1 << 20  # maximum size of one message in bytes
_LONGEST_BLOCK = 1 << 24  # maximum number of tokens per block
MOST_STATES = 1 << 19  # maximum number of states of one worker


class InvalidEvent(ValueError):
    """A malformed event or snapshot."""


@dataclass(eq=False)
class Stream:
    """One worker's stream since its last snapshot."""

    worker: Remote
    directory: Directory
    weights: int
    model: str  # digest of the weights at the server's start

    def apply(self, kind: str, fields: dict[str, Any]) -> None:
        """Applies one message to the directory.

        Raises:
            InvalidEvent: the message is malformed.
        """
        try:
            tier, states = str(fields["tier"])[:16], fields["states"]
            if kind == "evicted":
                for name in states:
                    self.directory.evicted(self.worker, tier, _name(name))
                return
            for name, link, tail, position in states:
                state = State(_name(name), _name(link), _count(tail), _count(position))
                if not 0 <= state.tail < self.directory.block or (state.position - state.tail) % self.directory.block:
                    raise InvalidEvent(f"a tail of {tail} tokens before position {position}")
                if not self.directory.stored(self.worker, tier, state):
                    log.debug("ignored a state at position %d: it contradicts another worker's state", position)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidEvent(f"malformed event: {error}") from None
        if self.directory.states_of(self.worker) > MOST_STATES:
            raise InvalidEvent(f"more than {MOST_STATES:,} states")


class EventFollowers:
    """All streams of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._directories: dict[tuple[int, int], Directory] = {}
        """Directories by block size and number of weight updates, which are part of states' names."""
        self._streams: dict[Remote, Stream] = {}
        self._tasks: dict[Remote, asyncio.Task[None]] = {}

    async def follow(self, interval: float) -> None:
        """Reads the streams of all current workers, until cancelled."""
        try:
            while True:
                workers = {*self._fleet.prefill, *self._fleet.decode}
                for worker in self._tasks.keys() - workers:
                    self._tasks.pop(worker).cancel()
                for worker in workers - self._tasks.keys():
                    self._tasks[worker] = asyncio.create_task(self._keep_reading(worker))
                await asyncio.sleep(interval)
        finally:
            tasks, self._tasks = [*self._tasks.values()], {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def has_stream(self, worker: Remote) -> bool:
        """Returns whether the worker reports its states."""
        return worker in self._streams

    def states(self) -> dict[str, int]:
        """Returns the number of states that each worker with a stream reported, by URL."""
        return {worker.url: stream.directory.states_of(worker) for worker, stream in self._streams.items()}

    def can_share(self, one: Remote, other: Remote) -> bool:
        """Returns whether both workers have the same weights, unchanged since their start."""
        first, second = self._streams.get(one), self._streams.get(other)
        return bool(first and second and first.model == second.model and not first.weights and not second.weights)

    @property
    def knows_any(self) -> bool:
        """Whether any worker reported a state."""
        return any(self._directories.values())

    def find(self, tokens: Sequence[int], salt: str | None, adapter: str | None = None) -> dict[Remote, Resumable]:
        """Returns the deepest state of a prompt on each worker that has one."""
        matches: dict[Remote, Resumable] = {}
        for (block, weights), directory in self._directories.items():
            chain = Chain(Scope(salt, weights, adapter=adapter), block)
            matches |= {state.replica: state for state in directory.find(chain, tokens)} if len(directory) else {}
        return matches

    # -- one worker's stream --

    async def _keep_reading(self, worker: Remote) -> None:
        pause = _AGAIN
        while True:
            if not worker.up:
                pause = _AGAIN
            else:
                why = "the stream ended"
                try:
                    await self._read(worker)
                except (httpx.HTTPError, TimeoutError, ValueError) as error:
                    why = str(error) or type(error).__name__
                except Exception as error:
                    log.exception("reading the events of %s failed", worker.url)
                    why = type(error).__name__
                finally:
                    had_snapshot = self._forget(worker)
                if had_snapshot:
                    log.info("stopped reading events of %s: %s", worker.url, why)
                pause = _AGAIN if had_snapshot else min(2 * pause, _MAX_PAUSE)
            await asyncio.sleep(pause)

    def _forget(self, worker: Remote) -> bool:
        stream = self._streams.pop(worker, None)
        if stream is None:
            return False
        stream.directory.forget(worker)
        in_use = {id(each.directory) for each in self._streams.values()}
        self._directories = {key: each for key, each in self._directories.items() if id(each) in in_use}
        return True

    async def _read(self, worker: Remote) -> None:
        fleet = self._fleet
        async with fleet.client.stream("GET", worker.url + _PATH, headers=fleet.headers, auth=fleet.auth) as answer:
            if answer.status_code != 200:
                log.debug("%s publishes no events: status %d", worker.url, answer.status_code)
                return
            async for kind, fields in _messages(answer):
                if kind == "snapshot":
                    self._begin(worker, fields)
                elif kind == "behind":
                    return
                elif worker not in self._streams:
                    raise InvalidEvent("events before a snapshot")
                else:
                    self._streams[worker].apply(kind, fields)

    def _begin(self, worker: Remote, fields: dict[str, Any]) -> None:
        try:
            key = block, weights = _count(fields["block"]), _count(fields["weights"])
        except (KeyError, ValueError):
            raise InvalidEvent("malformed snapshot") from None
        if not 1 <= block <= _LONGEST_BLOCK or weights < 0:
            raise InvalidEvent(f"invalid block size {block}")
        self._forget(worker)
        directory = self._directories.setdefault(key, Directory(block))
        model = str(fields.get("model", ""))[:128]
        self._streams[worker] = Stream(worker, directory, weights, model)


async def _messages(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields the name and data of each message. Raises TimeoutError if there is no data for `_SILENCE` seconds."""
    pieces, buffer = answer.aiter_bytes(), bytearray()
    while True:
        async with asyncio.timeout(_SILENCE):
            piece = await anext(pieces, b"")
        if not piece:
            return
        buffer += piece
        *whole, rest = bytes(buffer).split(b"\n\n")
        buffer = bytearray(rest)
        if len(buffer) > _LONGEST:
            raise InvalidEvent(f"message larger than {_LONGEST:,} bytes")
        for message in whole:
            lines = dict(line.split(b": ", 1) for line in message.split(b"\n") if b": " in line)
            if b"event" in lines:
                fields = from_json(lines.get(b"data", b"null"))
                if not isinstance(fields, dict):
                    raise InvalidEvent("message without fields")
                yield lines[b"event"].decode(errors="replace"), fields


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidEvent(f"{str(value)[:40]!r} is not a number of tokens")
    return value


def _name(text: Any) -> Name:
    name = bytes.fromhex(text)
    if len(name) != SIZE:
        raise InvalidEvent(f"a name of {len(name)} bytes")
    return name
