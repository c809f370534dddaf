"""Texts to token ids and back, without keeping the event loop waiting for long ones."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from checkpoints.tokenizer import Tokenizer
from serving.api.http.errors import ApiError
from serving.engine.sampling_params import SamplingParams

T = TypeVar("T")

_SHORT = 2048
"""Characters that are tokenised at once: below a millisecond, which is what handing them over would cost too."""
_KEPT = 1 << 16


class TextCodec:
    """The model's tokenizer for the server.

    Args:
        tokenizer: None where the model takes and gives token ids only; then `encode` and `encode_chat` refuse.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._texts: dict[int, str] = {}

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._require()
        return await self._run(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template."""
        tokenizer = self._require()
        if not tokenizer.has_chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions")

        def encode() -> list[int]:
            text = tokenizer.apply_chat_template(messages, **options)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._run(sum(len(str(message.get("content"))) for message in messages), encode)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        tokenizer = self._require()
        return await self._run(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def run(self, function: Callable[[], T]) -> T:
        """Something else that would keep the event loop, in the same threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def showing(self, params: SamplingParams, text: str) -> SamplingParams:
        """Parameters under which `text` shows in the output, should it be a special token of the model's."""
        tokenizer = self._require()
        hidden = tokenizer.token_to_id(text) in tokenizer.special_ids
        return dataclasses.replace(params, skip_special_tokens=False) if hidden else params

    def token(self, token_id: int) -> str:
        """One token's text; its id as a text where the model has no tokenizer."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) >= _KEPT:
                self._texts.clear()
            text = self._texts[token_id] = self.tokenizer.token_text(token_id)
        return text

    async def _run(self, size: int, function: Callable[[], T]) -> T:
        return function() if size <= _SHORT else await self.run(function)

    def _require(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: it takes prompts of token ids only")
        return self.tokenizer
