"""Stop texts in a stream: found across pieces, with text held back while it could begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on until one of the stop texts is complete.

    What could still become a stop text is held back, so that nothing that has been passed on is ever taken back.
    """

    def __init__(self, texts: Sequence[str], *, include: bool = False) -> None:
        self.texts = tuple(texts)
        self.found: str | None = None
        """The stop text that ended the stream."""
        self.active = True
        """False passes text on without looking for stop texts in it."""
        self._include = include
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes the next piece; returns what may be shown now. After a stop text nothing comes any more."""
        if self.found is not None:
            return ""
        if not self.texts or not self.active:
            return piece
        text = self._held + piece
        # The stop text that begins first wins; of those that begin together the longer, as it says more.
        hits = [(at, -len(stop), stop) for stop in self.texts if (at := text.find(stop)) >= 0]
        if hits:
            at, _, self.found = min(hits)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        hold = max((self._overlap(text, stop) for stop in self.texts), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The stream has ended without a stop text: what was held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
