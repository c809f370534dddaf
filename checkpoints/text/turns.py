"""Continues conversations whose earlier turns are token ids, so that these are never rendered again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoints.text.chat import ChatTemplateError, Message

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
