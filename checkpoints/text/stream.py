"""Text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character of UTF-8 takes at most four bytes, so at most three of them can be waiting for its end. Some decoders
# show a whole run of bytes as U+FFFD while its end is missing: then all of it waits, but not for ever.
MAX_WAITING = 3
PATIENCE = 32
# When nothing but invalid bytes arrives there is never a good place to cut; cut anyway before decoding becomes slow.
MAX_WINDOW = 512


class StreamDecoder:
    """Turns a growing list of token ids into pieces of text whose concatenation is the text of all ids together.

    Tokens cannot be decoded one by one: a character may be spread over several of them, and some tokenizers drop the
    space before the first token of whatever they are given. So a short window is decoded each time: the last tokens
    that gave text, then those that came since. Its end is held back while it is an incomplete character.

    Args:
        decode: ids to text.
        skip: ids that never give text (the special ones, where those are not shown).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._context = 0  # how many tokens at the window's front had given all their text before
        self._sent = 0  # how many characters of the window's text have been handed out

    def push(self, ids: Iterable[int]) -> str:
        """Adds tokens; returns the text that is certain now and was not before (often empty)."""
        fresh = [i for i in ids if i not in self._skip]
        if not fresh:
            return ""
        self._window += fresh
        text = self._decode(self._window)
        waiting = len(text) - len(text.rstrip(REPLACEMENT))
        if len(self._window) > PATIENCE:
            waiting = min(waiting, MAX_WAITING)
        if len(self._window) > MAX_WINDOW:
            waiting = 0
        piece = text[self._sent : len(text) - waiting]
        self._sent += len(piece)
        if piece and not waiting:
            self._shorten()
        return piece

    def flush(self) -> str:
        """Returns the remaining text after the last token. An incomplete character becomes U+FFFD."""
        piece = self._decode(self._window)[self._sent :] if self._window else ""
        self._window, self._context, self._sent = [], 0, 0
        return piece

    def _shorten(self) -> None:
        """Forget the old context: the tokens that have just given text take its place."""
        rest = self._window[self._context :]
        text = self._decode(rest)
        # Without visible text in front, the next token would be decoded as if it were the first of all.
        if text:
            self._window, self._sent = rest, len(text)
        self._context = len(self._window)
