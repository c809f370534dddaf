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
from serving.api.http.parsing.answer_pieces import AnswerPiece
from serving.engine.requests.output import CompletionOutput

BlockKind = Literal["reasoning", "text", "call"]
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


@dataclass(frozen=True)
class BlockChange:
    """The beginning, new text or the end of a block."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    """The new text."""


class Blocks:
    """Sorts the pieces of one choice into blocks. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False
        """Whether the last block is open."""

    def push(self, piece: AnswerPiece) -> Iterator[BlockChange]:
        """Yields the changes of a new piece."""
        for part in piece.parts:
            if isinstance(part, tuple):
                block, text = Block(part[0], len(self.all)), part[1]
            else:
                name, text = part.function.name or "", part.function.arguments
                block = Block("call", len(self.all), name=name, call_id=part.id or "")
            if block.call_id or not self._open or self.all[-1].kind != block.kind:
                yield from self.close()
                self.all.append(block)
                self._open = True
                yield BlockChange("begin", block)
            if text:
                self.all[-1].text += text
                yield BlockChange("more", self.all[-1], text)

    def close(self) -> Iterator[BlockChange]:
        """Yields the change at the end of the answer."""
        if self._open:
            self._open = False
            yield BlockChange("end", self.all[-1])


class BlocksWriter(ABC):
    """Writes the response to one request with one choice. A whole response consists of the same changes as a stream."""

    def __init__(self, turn: ChatTurn) -> None:
        self.job, self.tally = turn.job, turn.tally
        self._reader = turn.new_reader()
        self._blocks = Blocks()
        self._last: CompletionOutput | None = None
        """The latest output."""

    @abstractmethod
    def _begin(self) -> Sequence[NamedEvent]:
        """Returns the events before the first block."""

    @abstractmethod
    def _change(self, change: BlockChange) -> Sequence[NamedEvent]:
        """Records a change, and returns its events."""

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
        for change in self._changes(piece):
            yield from self._change(change)

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        return named_event(name, fields)

    def _changes(self, piece: ChoiceDelta) -> Iterator[BlockChange]:
        self._last = piece.new
        new = piece.new
        yield from self._blocks.push(self._reader.push(new.text, last=new.finished, cut=new.finish_reason != "stop"))
        if new.finished:
            yield from self._close()

    def _close(self) -> Iterator[BlockChange]:
        yield from self._blocks.close()
