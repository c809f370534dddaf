"""Tokenization and detokenization without blocking the event loop.

The codec refuses texts that are too long. It checks the number of characters first, then the tokens of the beginning,
then the tokens of the whole text. Separate threads tokenize long texts, so that short texts never wait for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from checkpoints.text.chat import ChatTemplateError
from checkpoints.text.stream import continued, following_text
from checkpoints.tokenizer import Tokenizer
from serving.api.http.errors import OVERFLOW, ApiError
from serving.core.cache.retention import Mark
from serving.core.errors import RequestError, check_prompt_length
from serving.engine.requests.conversations import marks_at
from serving.engine.requests.sampling_params import SamplingParams

T = TypeVar("T")

_SHORT = 2048
"""Texts of at most this many characters are tokenized on the event loop: that takes less time than a thread switch."""
_LONG = 1 << 15
"""Texts and conversations of at least this many characters go to the threads for long texts."""
_THREADS = 2
_BEGINNING = 8
"""Characters per allowed token in the beginning that is tokenized first: about twice the text that fits."""
_KEPT = 1 << 16
_MARKED_SECONDS = 0.5
"""Once a conversation has been rendered for so long, no more marks are looked for."""
_LARGE, _MOST_TURNS = ("tools", "documents"), 64


class TextCodec:
    """The model's tokenizer for the server.

    Args:
        tokenizer: None if the model has none; then `encode` and `encode_chat` raise `ApiError`.
        max_model_len: prompts of this many tokens or more are refused.
        client: returns the client of the current task. Each has at most `_THREADS` texts in the threads at a time, so
            that clients take turns.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, max_model_len: int, client: Callable[[], str | None] = lambda: None
    ) -> None:
        self.tokenizer, self.max_model_len, self._client = tokenizer, max_model_len, client
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._threads_for_long = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer-long")
        self._places: dict[tuple[ThreadPoolExecutor, str | None], asyncio.Semaphore] = {}
        text_of: Callable[[int], str] = "token_id:{}".format if tokenizer is None else tokenizer.token_text
        self._text_of = functools.lru_cache(_KEPT)(text_of)
        self._turns: dict[str, str] = {}
        """By the variables of the template: the text that begins the model's turn, after the history."""

    def close(self) -> None:
        """Stops the threads."""
        for threads in (self._threads, self._threads_for_long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, fits: bool = True
    ) -> list[list[int]]:
        """Returns the token ids of each text. `fits`: refuse a text that is too long for a prompt.

        Raises:
            ApiError: a text is too long, or there is no tokenizer.
        """
        tokenizer = self._require()
        for text in texts:
            self._check_characters(len(text), "prompt")
        size = sum(map(len, texts))
        if size <= _SHORT:
            return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return await self.run(size, lambda: [self._encode(text, add_special_tokens, "prompt", fits) for text in texts])

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        places: Callable[..., Mapping[int, float | None]] | None = None,
        previous_token_ids: Sequence[int] = (),
        add_special_tokens: bool = False,
        fits: bool = True,
        **options: Any,
    ) -> tuple[list[int], tuple[Mark, ...]]:
        """Returns the token ids of a conversation, rendered by the model's chat template, and its marks.

        Args:
            messages: the conversation.
            places: returns the characters to mark in its text. Its arguments: what renders, the messages, the text and
                the options. None: no marks.
            previous_token_ids: the earlier turns; `messages` are then those that follow. Without marks.
            add_special_tokens: also those that the tokenizer adds. Without marks.
            fits: as in `encode`.
            **options: those of the template.

        Raises:
            ApiError: the conversation is too long, or there is no chat template.
            ChatTemplateError: the template rejects the conversation, or does not terminate.
        """
        tokenizer = self._require()
        if not tokenizer.has_chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        check_fits(len(messages), self.max_model_len, "messages", at_least=True)  # each has a token or more

        def encode() -> tuple[list[int], tuple[Mark, ...]]:
            begin, render = time.monotonic(), tokenizer.apply_chat_template

            def render_in_time(each: Sequence[dict[str, Any]], /, **given: Any) -> str:
                of_history = each is messages and not given.get("add_generation_prompt", True)
                key = repr(sorted((name, value) for name, value in given.items() if name not in _LARGE))
                turn = self._turns.get(key, "")
                if of_history and turn and text.endswith(turn):
                    return text.removesuffix(turn)
                if time.monotonic() - begin > _MARKED_SECONDS:
                    raise ChatTemplateError("rendering takes too long to look for marks")
                shown = render(each, **given)
                if of_history and text.startswith(shown) and max(len(text) - len(shown), len(key)) < _SHORT:
                    self._turns = dict([*self._turns.items(), (key, text[len(shown) :])][-_MOST_TURNS:])
                return shown

            text = following_text(render, messages, **options) if previous_token_ids else render(messages, **options)
            self._check_characters(len(text), "messages")
            if places is None or previous_token_ids or add_special_tokens:
                return continued(previous_token_ids, self._encode(text, add_special_tokens, "messages", fits)), ()
            self._check_beginning(text, False, "messages", fits)
            found = places(render_in_time, messages, text, **options)
            ids, ends = tokenizer.encode_with_ends(text)
            return ids, marks_at(found, ends)

        return await self.run(max(characters([messages, options], _LONG), _SHORT + 1), encode)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        tokenizer = self._require()
        return await self.run(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Calls a function that processes so many characters or tokens: at once, or in a thread if they are many."""
        if size <= _SHORT:
            return function()
        threads = self._threads if size < _LONG else self._threads_for_long
        async with self._places.setdefault((threads, self._client()), asyncio.Semaphore(_THREADS)):
            return await asyncio.get_running_loop().run_in_executor(threads, function)

    def special_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns the ids of the texts that are special tokens of the model."""
        tokenizer = self._require()
        ids = ((text, tokenizer.token_to_id(text)) for text in texts)
        return {text: token for text, token in ids if token is not None and token in tokenizer.special_ids}

    def showing(self, params: SamplingParams, *texts: str) -> SamplingParams:
        """Returns `params`, changed to keep special tokens in the output if one of `texts` is a special token."""
        return dataclasses.replace(params, skip_special_tokens=False) if self.special_ids(texts) else params

    def token(self, token_id: int) -> str:
        """Returns one token's text; "token_id:ID" if the model has no tokenizer."""
        return self._text_of(token_id)

    def first_token(self, token_id: int) -> str:
        """Returns one token's text at the begin of a text, where some tokenizers leave out a space."""
        text = self.token(token_id)
        if self.tokenizer is None or not text.startswith(" "):
            return text
        shown = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return shown if text == f" {shown}" else text

    def is_special(self, token_id: int) -> bool:
        """Returns whether the token is special, and so omitted with `skip_special_tokens`."""
        return self.tokenizer is not None and token_id in self.tokenizer.special_ids

    def hidden(self, token_ids: Sequence[int], text: str) -> set[int]:
        """Returns the positions of the tokens that the tokenizer added around a prompt's text."""
        places = range(len(token_ids))
        front = itertools.takewhile(
            lambda i: self.is_special(token_ids[i]) and not text.startswith(self.token(token_ids[i])), places
        )
        back = itertools.takewhile(
            lambda i: self.is_special(token_ids[i]) and not text.endswith(self.token(token_ids[i])), reversed(places)
        )
        return {*front, *back}

    def _encode(self, text: str, add_special_tokens: bool, param: str, fits: bool) -> list[int]:
        self._check_beginning(text, add_special_tokens, param, fits)
        # A batch of one: unlike `encode`, `encode_batch` releases the interpreter lock.
        return self._require().encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _check_beginning(self, text: str, add_special_tokens: bool, param: str, fits: bool) -> None:
        tokenizer, most = self._require(), self.max_model_len
        beginning = text[: _BEGINNING * most]
        if fits and len(text) > 2 * len(beginning):
            count = len(tokenizer.encode_batch([beginning], add_special_tokens=add_special_tokens)[0])
            # Text after the cut can change the last few tokens before it.
            if count > most + most // 8:
                check_fits(count - most // 8, most, param, at_least=True)

    def _check_characters(self, count: int, param: str) -> None:
        """Refuses a text that is too long even if it consists of the vocabulary's longest tokens."""
        if self.tokenizer is not None:
            check_fits(count // self.tokenizer.longest_token, self.max_model_len, param, at_least=True)

    def _require(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send the prompt as token ids")
        return self.tokenizer


def check_fits(length: int, max_model_len: int, param: str, *, at_least: bool = False) -> None:
    """Checks the length of a prompt, in tokens. `at_least`: `length` is a lower bound.

    Raises:
        ApiError: the prompt is too long.
    """
    try:
        check_prompt_length(length, max_model_len, at_least=at_least)
    except RequestError as error:
        raise ApiError(
            400, str(error), param=param, code=OVERFLOW,
            # Clients of Anthropic's API search for the first words.
            anthropic=f"prompt is too long: {length} tokens > {max_model_len - 1} maximum",
        ) from None  # fmt: skip


def characters(value: Any, most: int) -> int:
    """Counts characters and items in nested texts, lists and tables. Stops counting at `most`."""
    count, waiting = 0, [value]
    while waiting and count < most:
        match waiting.pop():
            case str() as text:
                count += len(text)
            case Mapping() as table:
                count += len(table)
                waiting.extend(table)
                waiting.extend(table.values())
            case list() as items:
                count += len(items)
                waiting.extend(items)
    return count
