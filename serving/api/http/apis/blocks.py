"""Responses that are sequences of blocks (reasoning, text, calls): those of `/v1/responses` and `/v1/messages`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from serving.api.http.apis.inputs import ChatTurn
from serving.api.http.connection.streaming import named_event
from serving.api.http.generation import ChoiceDelta
from serving.api.http.protocol.chat import ToolCall
from serving.engine.requests.output import CompletionOutput

BlockKind = Literal["reasoning", "text", "call"]
BlockChange = Literal["begin", "more", "end"]
"""The beginning, new text or the end of a block."""
NamedEvent = tuple[str, Mapping[str, Any]]
"""The name and the fields of an event."""


@dataclass
class Block:
    """One block of an answer."""

    kind: BlockKind
    index: int
    text: str = ""
    """The text so far; for a call, its arguments."""
    name: str = ""
    """Name of the called function."""
    call_id: str = ""
    item_id: str = ""
    """Id of its item in `/v1/responses`."""


class BlocksWriter(ABC):
    """Writes the response to one request with one choice. A whole response consists of the same changes as a stream. At
    most one block is open at a time."""

    def __init__(self, turn: ChatTurn) -> None:
        self.job = turn.job
        self._reader = turn.new_reader()
        self._blocks: list[Block] = []
        self._open = False
        """Whether the last block is open."""
        self._last: CompletionOutput | None = None
        """The latest output."""

    @abstractmethod
    def _begin(self) -> Sequence[NamedEvent]:
        """Returns the events before the first block."""

    @abstractmethod
    def _change(self, what: BlockChange, block: Block, text: str = "") -> Sequence[NamedEvent]:
        """Records a change of a block, and returns its events; `text` is new."""

    @abstractmethod
    def _end(self) -> Sequence[NamedEvent]:
        """Returns the events after the last block."""

    @abstractmethod
    def _whole(self) -> BaseModel:
        """Returns the whole response."""

    def response(self, pieces: Sequence[ChoiceDelta]) -> BaseModel:
        """Returns the whole response, from the whole output."""
        for piece in pieces:
            for _ in self._named(piece):
                pass
        return self._whole()

    async def events(self, pieces: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response as events."""
        async for piece in pieces:
            for event in self._named(piece):
                yield self._event(*event)
        for event in self._end():
            yield self._event(*event)

    def _named(self, piece: ChoiceDelta) -> Iterator[NamedEvent]:
        if self._last is None:
            yield from self._begin()
        self._last = new = piece.new
        for part in self._reader.push(new.text, last=new.finished, cut=new.finish_reason != "stop").parts:
            yield from self._add(part)
        if new.finished:
            yield from self._finish()

    def _finish(self) -> Iterator[NamedEvent]:
        """Ends the answer."""
        yield from self._close()

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        return named_event(name, fields)

    def _add(self, part: tuple[Literal["reasoning", "text"], str] | ToolCall) -> Iterator[NamedEvent]:
        """Adds a part of the answer to the open block, or to a new one."""
        if isinstance(part, tuple):
            block, text = Block(part[0], len(self._blocks)), part[1]
        else:
            name, text = part.function.name or "", part.function.arguments
            block = Block("call", len(self._blocks), name=name, call_id=part.id or "")
        if block.call_id or not self._open or self._blocks[-1].kind != block.kind:
            yield from self._close()
            self._blocks.append(block)
            self._open = True
            yield from self._change("begin", block)
        if text:
            self._blocks[-1].text += text
            yield from self._change("more", self._blocks[-1], text)

    def _close(self) -> Iterator[NamedEvent]:
        """Ends the open block, if there is one."""
        if self._open:
            self._open = False
            yield from self._change("end", self._blocks[-1])
