"""An answer as a sequence of blocks (reasoning, text, calls), for `/v1/responses` and `/v1/messages`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from serving.api.http.parsing.answer import AnswerPiece


@dataclass
class Block:
    """One block of an answer."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    """The text so far; for a call, its arguments."""
    name: str = ""
    """Name of the called function."""
    call_id: str = ""


@dataclass(frozen=True)
class Change:
    """An event of a block."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    """The new text."""


class Blocks:
    """Sorts the pieces of one choice into blocks. At most one block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, piece: AnswerPiece) -> Iterator[Change]:
        """Yields the events of a new piece."""
        if piece.reasoning:
            yield from self._add("reasoning", piece.reasoning)
        if piece.text:
            yield from self._add("text", piece.text)
        for call in piece.calls:
            if call.name is not None:
                yield from self._begin(Block("call", len(self.all), name=call.name, call_id=call.id or ""))
            if call.arguments:
                yield from self._add("call", call.arguments)

    def close(self) -> Iterator[Change]:
        """Yields the events at the end of the answer."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Change("end", block)

    def _add(self, kind: Literal["reasoning", "text", "call"], text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(kind, len(self.all)))
        assert self._open is not None
        self._open.text += text
        yield Change("more", self._open, text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self.close()
        self.all.append(block)
        self._open = block
        yield Change("begin", block)
