"""An answer as a row of blocks, one after the other: reasoning, text, calls. The newer APIs tell of answers so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from serving.api.http.answer import AnswerPiece


@dataclass
class Block:
    """One of them."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    text: str = ""
    """All of it so far; of a call, its arguments."""
    name: str = ""
    """Of the function that is called."""
    call_id: str = ""


@dataclass(frozen=True)
class Change:
    """What has happened to a block."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""
    """What is new."""


class Blocks:
    """Sorts pieces of one choice into blocks. At most one of them is open at any time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, piece: AnswerPiece) -> Iterator[Change]:
        """What a piece changes."""
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
        """What ends when the answer does."""
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
