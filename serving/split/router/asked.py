"""A request as it came to the router, and what can be told of its prompt without a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_BEGINNINGS = {
    "completions": ("prompt",),
    "chat/completions": ("messages",),
    "responses": ("instructions", "input"),
    "messages": ("system", "messages"),
}
"""Fields that a prompt begins with."""


@dataclass(frozen=True)
class ClientRequest:
    """One request as it came."""

    kind: str
    """The path below `/v1`: `completions`, `chat/completions`, `responses` or `messages`."""
    content: bytes
    """Passed on as it is."""
    body: dict[str, Any]
    """The same, parsed; it has been validated."""
    headers: dict[str, str]
    """Those that are passed on."""

    @property
    def stream(self) -> bool:
        """Whether the answer comes piece by piece."""
        return bool(self.body.get("stream"))

    @property
    def skippable(self) -> bool:
        """Whether no output depends on computing the prompt's tokens, so that the answering worker can skip them."""
        body = self.body
        return body.get("prompt_logprobs") is None and not (body.get("echo") and body.get("logprobs") is not None)

    @property
    def splittable(self) -> bool:
        """Whether a prefill worker can do the prompt: there is one, and nothing is asked of its tokens."""
        if not self.skippable:
            return False
        if self.kind != "completions":
            return True
        prompt = self.body.get("prompt")
        if isinstance(prompt, list):
            return bool(prompt) and isinstance(prompt[0], int)
        return isinstance(prompt, str)

    @property
    def text(self) -> str:
        """What the prompt begins with, for choosing workers: equal beginnings of prompts are equal beginnings of it."""
        given: Any = [self.body[name] for name in _BEGINNINGS[self.kind] if self.body.get(name) is not None]
        given = given[0] if len(given) == 1 else given
        return given if isinstance(given, str) else json.dumps(given)
