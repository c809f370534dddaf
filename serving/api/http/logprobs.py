"""Log-probabilities in the forms of the two APIs."""

from __future__ import annotations

from collections.abc import Sequence

from serving.api.http.protocol.chat import ChatLogprob, ChatLogprobs, TokenLogprob
from serving.api.http.protocol.completions import CompletionLogprobs
from serving.api.http.text import TextCodec
from serving.engine.output import TokenLogprobs

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class LogprobWriter:
    """Writes one request's log-probabilities.

    Args:
        codec: for the tokens' texts.
        top: how many of the likeliest tokens to show.
        as_ids: name tokens "token_id:42".
    """

    def __init__(self, codec: TextCodec, *, top: int, as_ids: bool) -> None:
        self._codec, self._top, self._as_ids = codec, top, as_ids

    def completion(
        self, tokens: Sequence[int], tables: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> CompletionLogprobs:
        """The parallel lists of `/v1/completions`; `offsets` are where the tokens' texts begin."""
        top: list[dict[str, float] | None] | None = [] if self._top else None
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=top, text_offset=offsets)
        for token, table in zip(tokens, tables, strict=True):
            written.tokens.append(self._name(token))
            written.token_logprobs.append(None if table is None else _finite(table[token].logprob))
            if written.top_logprobs is not None:
                written.top_logprobs.append(None if table is None else self._named(token, table))
        return written

    def chat(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """The list of objects of `/v1/chat/completions`."""
        return ChatLogprobs(
            content=[
                ChatLogprob(
                    **dict(self._entry(token, table[token].logprob)),
                    top_logprobs=[self._entry(other, value) for other, value in self._likeliest(table)],
                )
                for token, table in zip(tokens, tables, strict=True)
            ]
        )

    def _named(self, token: int, table: TokenLogprobs) -> dict[str, float]:
        """By text. Of tokens with equal text (pieces of characters) the likeliest stands for all."""
        named: dict[str, float] = {}
        for other, value in [*self._likeliest(table), (token, table[token].logprob)]:
            name = self._name(other)
            named[name] = max(_finite(value), named.get(name, _LEAST))
        return named

    def _likeliest(self, table: TokenLogprobs) -> list[tuple[int, float]]:
        ranked = sorted((entry.rank, token, entry.logprob) for token, entry in table.items() if entry.rank is not None)
        return [(token, logprob) for _, token, logprob in ranked[: self._top]]

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        text = self._codec.token(token)
        # Part of a character has no text of its own, and so no bytes that could be told.
        known = not self._as_ids and "\N{REPLACEMENT CHARACTER}" not in text
        return TokenLogprob(
            token=self._name(token), logprob=_finite(logprob), bytes=list(text.encode()) if known else None
        )

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._codec.token(token)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
