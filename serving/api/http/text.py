"""Texts to token ids and back, without keeping the event loop waiting for long ones.

What is too long is refused before it is tokenised, as far as its length alone tells; then by its beginning; then by the
count. Long texts have threads of their own, so that short ones never wait for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from checkpoints.tokenizer import Tokenizer
from serving.api.http.errors import ApiError
from serving.core import RequestError, check_prompt_length
from serving.engine.sampling_params import SamplingParams

T = TypeVar("T")

_SHORT = 2048
"""Characters that are tokenised at once: below a millisecond, which is what handing them over would cost too."""
_LONG = 1 << 15
"""Characters, of a text or a conversation, from which on it goes to the threads for long ones."""
_BEGINNING = 8
"""Characters for each token allowed in the beginning of a text that is tokenised first: about twice what fits."""
_KEPT = 1 << 16
_TOO_LONG = "prompt is too long"
"""What clients of Anthropic's API look for."""


class TextCodec:
    """The model's tokenizer for the server.

    Args:
        tokenizer: None where the model takes and gives token ids only; then `encode` and `encode_chat` refuse.
        max_model_len: prompts of so many tokens are refused.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer, self._max_model_len = tokenizer, max_model_len
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._threads_for_long = ThreadPoolExecutor(2, thread_name_prefix="tokenizer-long")
        self._texts: dict[int, str] = {}

    def close(self) -> None:
        """Stop the threads."""
        for threads in (self._threads, self._threads_for_long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, fits: bool = True
    ) -> list[list[int]]:
        """Token ids of each text. `fits`: they are prompts, and refused if one is too long for that.

        Raises:
            ApiError: one is too long, whatever it is for, or there is no tokenizer.
        """
        tokenizer = self._require()
        for text in texts:
            self._check_characters(len(text), "prompt")
        size = sum(map(len, texts))
        if size <= _SHORT:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return await self._run(size, lambda: [self._encode(text, add_special_tokens, "prompt", fits) for text in texts])

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_special_tokens: bool = False, fits: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template; `fits` as in `encode`.

        Raises:
            ApiError: it is too long, or there is no chat template.
            ChatTemplateError: the template refuses it, or does not come to an end.
        """
        tokenizer = self._require()
        if not tokenizer.has_chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        if len(messages) > self._max_model_len:
            raise ApiError(
                400,
                f"{len(messages):,} messages: this model's maximum context length is {self._max_model_len:,} tokens",
                param="messages", code="context_length_exceeded", anthropic=f"{_TOO_LONG}: {len(messages)} messages",
            )  # fmt: skip

        def encode() -> list[int]:
            text = tokenizer.apply_chat_template(messages, **options)
            self._check_characters(len(text), "messages")
            return self._encode(text, add_special_tokens, "messages", fits)

        return await self._run(characters([messages, options], _LONG), encode)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        tokenizer = self._require()
        if len(ids) <= _SHORT:
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return await self._run(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text."""
        if len(token_ids) <= _SHORT:
            return [self.token(token_id) for token_id in token_ids]
        return await self._run(len(token_ids), lambda: [self.token(token_id) for token_id in token_ids])

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The ids of those texts that are special tokens of the model's."""
        tokenizer = self._require()
        ids = {text: tokenizer.token_to_id(text) for text in texts}
        return {
            text: token_id
            for text, token_id in ids.items()
            if token_id is not None and token_id in tokenizer.special_ids
        }

    def showing(self, params: SamplingParams, *texts: str) -> SamplingParams:
        """Parameters under which these texts show in the output, should one be a special token of the model's."""
        return dataclasses.replace(params, skip_special_tokens=False) if self.special_ids(texts) else params

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

    def is_special(self, token_id: int) -> bool:
        """Whether texts without special tokens leave it out."""
        return self.tokenizer is not None and token_id in self.tokenizer.special_ids

    def hidden(self, token_ids: Sequence[int], text: str) -> set[int]:
        """Which of a prompt's tokens the tokenizer has added around its text: their places."""
        places = range(len(token_ids))
        front = itertools.takewhile(
            lambda i: self.is_special(token_ids[i]) and not text.startswith(self.token(token_ids[i])), places
        )
        back = itertools.takewhile(
            lambda i: self.is_special(token_ids[i]) and not text.endswith(self.token(token_ids[i])), reversed(places)
        )
        return {*front, *back}

    def _encode(self, text: str, add_special_tokens: bool, param: str, fits: bool) -> list[int]:
        tokenizer, most = self._require(), self._max_model_len
        beginning = text[: _BEGINNING * most]
        if fits and len(text) > 2 * len(beginning):
            count = len(tokenizer.encode_batch([beginning], add_special_tokens=add_special_tokens)[0])
            # What follows the cut can change the few tokens before it.
            if count > most + most // 8:
                check_fits(count - most // 8, most, param, at_least=True)
        # A batch of one: unlike `encode`, it lets other threads run.
        return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _check_characters(self, count: int, param: str) -> None:
        """Refuse a text that is too long even if it consists of the longest tokens there are."""
        if self.tokenizer is not None:
            check_fits(count // self.tokenizer.longest_token, self._max_model_len, param, at_least=True)

    async def _run(self, size: int, function: Callable[[], T]) -> T:
        threads = self._threads if size < _LONG else self._threads_for_long
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    def _require(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: it takes prompts of token ids only")
        return self.tokenizer


def check_fits(length: int, max_model_len: int, param: str, *, at_least: bool = False) -> None:
    """Refuse a prompt of so many tokens, or of `at_least` so many, if it is too long.

    Raises:
        ApiError: it is.
    """
    try:
        check_prompt_length(length, max_model_len, at_least=at_least)
    except RequestError as error:
        raise ApiError(
            400, str(error), param=param, code="context_length_exceeded",
            anthropic=f"{_TOO_LONG}: {length} tokens > {max_model_len - 1} maximum",
        ) from None  # fmt: skip


def characters(value: Any, most: int) -> int:
    """How many characters there are in texts, lists and tables; anything from `most` on where there are as many."""
    found, waiting = 0, [value]
    while waiting and found < most:
        match waiting.pop():
            case str() as text:
                found += len(text)
            case Mapping() as table:
                found += len(table)
                waiting.extend(table)
                waiting.extend(table.values())
            case list() as items:
                found += len(items)
                waiting.extend(items)
    return found
