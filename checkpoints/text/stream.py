"""Text that grows: token by token, and by the next turn of a conversation whose earlier turns are token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from checkpoints.text.chat import ChatTemplateError, Message

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


_ANSWER = "The first answer."
_QUESTION = "The first question."
_BEFORE: list[Message] = [{"role": "user", "content": _QUESTION}]


def following_text(render: Callable[..., str], messages: Sequence[Message], /, **options: Any) -> str:
    """Returns the text between an answer of the model and its next turn: the end of the answer's turn, and `messages`.

    The template renders the messages after a short conversation, because the text before them is not known.

    Args:
        render: renders a conversation, as `Tokenizer.apply_chat_template`.
        messages: the messages after the answer. If tools' results come first, the answer called these tools.
        **options: those of `render`.

    Raises:
        ChatTemplateError: the template refuses the messages, or renders earlier turns otherwise if others follow.
    """
    answered = {"role": "assistant", "content": _ANSWER}
    plain = render([*_BEFORE, answered], **{**options, "add_generation_prompt": False}).rpartition(_ANSWER)
    calls = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") != "tool":
            break
        function = {"name": message.get("name") or "tool", "arguments": "{}"}
        calls.append({"id": message.get("tool_call_id") or "call", "type": "function", "function": function})
    history = [*_BEFORE, {**answered, "tool_calls": calls} if calls else answered]
    after = render([*history, *messages], **options)
    if calls:
        before = render(history, **{**options, "add_generation_prompt": False})
        same, following = after.startswith(before), plain[2] + after[len(before) :]
    else:
        # Between question and answer, many templates show an empty thought in the last turn only.
        before, _, following = after.partition(_ANSWER)
        same = before.partition(_QUESTION)[:2] == plain[0].partition(_QUESTION)[:2]
    if not plain[1] or not same:
        raise ChatTemplateError("the chat template cannot continue token ids: it renders earlier turns in another way")
    return following


def continued(token_ids: Sequence[int], following: Sequence[int]) -> list[int]:
    """Joins the ids of earlier turns and of the text that follows them. If the model has written the token that ends
    its turn, that token is not repeated."""
    repeated = bool(token_ids and following) and token_ids[-1] == following[0]
    return [*token_ids, *following[repeated:]]
