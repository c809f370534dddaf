"""Log-probabilities in the formats of completions and chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from serving.api.http.connection.streaming import listed
from serving.api.http.protocol.chat import ChatLogprob, ChatLogprobs, TokenLogprob
from serving.api.http.protocol.completions import CompletionLogprobs, PromptLogprob
from serving.api.http.text import TextCodec
from serving.engine.requests.output import TokenLogprobs

_LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class LogprobWriter:
    """Writes one request's log-probabilities, with the `top` likeliest tokens; `as_ids` names tokens "token_id:42"."""

    def __init__(self, codec: TextCodec, *, top: int, as_ids: bool) -> None:
        self._codec, self._top, self._as_ids = codec, top, as_ids

    def completion(
        self,
        tokens: Sequence[int],
        prompt: Sequence[TokenLogprobs | None],
        output: Sequence[TokenLogprobs],
        offsets: list[int],
    ) -> CompletionLogprobs:
        """Returns the parallel lists of `/v1/completions`. `prompt` and `output` are the tables of the tokens, which
        `offsets` gives the positions of."""
        echoed, written = len(prompt), len(tokens)

        def pairs(begin: int, end: int) -> Iterator[tuple[int, TokenLogprobs | None]]:
            tables = [*prompt[begin:end], *output[max(begin - echoed, 0) : max(end - echoed, 0)]]
            return zip(tokens[begin:end], tables, strict=True)

        def values(begin: int, end: int) -> list[float | None]:
            return [None if table is None else _finite(table[token].logprob) for token, table in pairs(begin, end)]

        def top(begin: int, end: int) -> list[dict[str, float] | None]:
            return [None if table is None else self._named(token, table) for token, table in pairs(begin, end)]

        return CompletionLogprobs.model_construct(
            tokens=listed(written, lambda begin, end: [self._name(token) for token in tokens[begin:end]]),
            token_logprobs=listed(written, values),
            top_logprobs=listed(written, top, self._top) if self._top else None,
            text_offset=offsets,
        )

    def prompt(self, tables: Sequence[TokenLogprobs | None]) -> list[dict[int, PromptLogprob] | None]:
        """Returns `prompt_logprobs` of `/v1/completions`: by token id, for each token of the prompt."""

        def part(begin: int, end: int) -> list[dict[int, PromptLogprob] | None]:
            return [
                None if table is None
                else {token: {"logprob": _finite(each.logprob), "rank": each.rank} for token, each in table.items()}
                for table in tables[begin:end]
            ]  # fmt: skip

        values = max((len(table) for table in tables[:2] if table is not None), default=0)
        written: list[dict[int, PromptLogprob] | None] = listed(len(tables), part, values)
        return written

    def chat(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """Returns the list of objects of `/v1/chat/completions`."""

        def part(begin: int, end: int) -> list[ChatLogprob]:
            return self.entries(tokens[begin:end], tables[begin:end])

        return ChatLogprobs.model_construct(content=listed(len(tokens), part, self._top))

    def entries(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
        """Returns the objects of these tokens."""
        return [
            ChatLogprob(
                **dict(self._entry(token, table[token].logprob)),
                top_logprobs=[self._entry(other, value) for other, value in self._likeliest(table)],
            )
            for token, table in zip(tokens, tables, strict=True)
        ]

    def _named(self, token: int, table: TokenLogprobs) -> dict[str, float]:
        """Returns log-probabilities by text. If tokens have the same text (parts of characters), the likeliest one
        counts."""
        named: dict[str, float] = {}
        for other, value in [*self._likeliest(table), (token, table[token].logprob)]:
            name = self._name(other)
            named[name] = max(_finite(value), named.get(name, _LEAST))
        return named

    def _likeliest(self, table: TokenLogprobs) -> list[tuple[int, float]]:
        ranked = sorted((entry.rank, token, entry.logprob) for token, entry in table.items() if entry.rank is not None)
        return [(token, logprob) for _, token, logprob in ranked[: self._top]]

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        tokenizer = self._codec.tokenizer
        known = None if self._as_ids or tokenizer is None else tokenizer.token_bytes(token)
        return TokenLogprob(
            token=self._name(token), logprob=_finite(logprob), bytes=None if known is None else list(known)
        )

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._codec.token(token)


class TextLogprobs:
    """Log-probabilities of the tokens of an answer's text, without reasoning, calls and special tokens. `reasoning`
    counts the reasoning tokens; None if there is no reasoning."""

    def __init__(self, codec: TextCodec, *, top: int, reasoning: Callable[[list[int]], int] | None) -> None:
        self._codec, self._reasoning = codec, reasoning
        self._writer = LogprobWriter(codec, top=top, as_ids=False)
        self._tokens: list[int] = []
        self._tables: list[TokenLogprobs] = []
        self._taken: int | None = None
        """Number of tokens written or skipped so far; None before the text starts."""
        self._text = self._covered = 0
        """Numbers of characters of the text so far, and of the tokens written so far."""

    def push(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs]) -> None:
        """Appends new tokens of the choice."""
        self._tokens += tokens[: len(tables)]
        self._tables += tables

    def take(self, characters: int) -> list[ChatLogprob]:
        """Returns the entries of the next `characters` characters of text."""
        if self._taken is None:
            self._taken = 0 if self._reasoning is None else self._reasoning(self._tokens)
        self._text += characters
        begin = self._taken
        while self._taken < len(self._tokens) and self._covered < self._text:
            token = self._tokens[self._taken]
            if not self._codec.is_special(token):
                shown = self._codec.token(token) if self._covered else self._codec.first_token(token)
                self._covered += len(shown)
            self._taken += 1
        return self._written(begin, self._taken)

    def rest(self) -> list[ChatLogprob]:
        """Returns the entries of all remaining tokens. Used for an answer that ends with its text."""
        begin, self._taken = self._taken or 0, len(self._tokens)
        return self._written(begin, self._taken)

    def _written(self, begin: int, end: int) -> list[ChatLogprob]:
        shown = [i for i in range(begin, end) if not self._codec.is_special(self._tokens[i])]
        return self._writer.entries([self._tokens[i] for i in shown], [self._tables[i] for i in shown])


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
