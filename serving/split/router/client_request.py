"""A client's request at the router, and properties of its prompt that need no tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from serving.api.http.apis.text_api import TEXT_APIS


@dataclass(frozen=True)
class ClientRequest:
    """One request of a client."""

    kind: str
    """The path below `/v1/`, a key of `TEXT_APIS`."""
    content: bytes
    """The body, forwarded unchanged."""
    body: dict[str, Any]
    """The parsed and validated body."""
    headers: dict[str, str]
    """The headers to forward."""

    @property
    def stream(self) -> bool:
        """Whether the response is streamed."""
        return bool(self.body.get("stream"))

    @property
    def skippable(self) -> bool:
        """Whether the worker may skip the prompt's tokens, because no output needs their computation."""
        body = self.body
        if any(body.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids")):
            return False
        return not (body.get("echo") and body.get("logprobs") is not None)

    @property
    def splittable(self) -> bool:
        """Whether a prefill worker can compute the prompt: there is one prompt, and it is `skippable`."""
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
        """Text for choosing workers: prompts with the same beginning have texts with the same beginning."""
        fields: Any = [
            self.body[name] for name in TEXT_APIS[self.kind].prompt_fields if self.body.get(name) is not None
        ]
        fields = fields[0] if len(fields) == 1 else fields
        return fields if isinstance(fields, str) else json.dumps(fields)
