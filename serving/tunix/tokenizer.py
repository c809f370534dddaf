"""This project's tokenizer with the methods that Tunix calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from checkpoints.tokenizer import Tokenizer


class TunixTokenizer:
    """The interface of Tunix's tokenizers over a `Tokenizer`.

    Raises:
        ValueError: the tokenizer has no end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer defines no eos_token: Tunix needs one")
        self._tokenizer, self._eos = tokenizer, tokenizer.eos_token_id

    def encode(self, text: str, **options: Any) -> list[int]:
        """Returns token ids; `options` are those of `Tokenizer.encode`."""
        return self._tokenizer.encode(text, **options)

    def decode(self, ids: Iterable[int], **options: Any) -> str:
        """Returns text; `options` are those of `Tokenizer.decode`."""
        return self._tokenizer.decode(ids, **options)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool = False, **options: Any) -> Any:
        """Returns the text of a conversation, or its token ids with `tokenize`."""
        text = self._tokenizer.apply_chat_template(messages, **options)
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text

    def bos_id(self) -> int | None:
        """The id of the token that begins a sequence."""
        return self._tokenizer.bos_token_id

    def eos_id(self) -> int:
        """The id of the token that ends a sequence."""
        return self._eos

    def pad_id(self) -> int:
        """The id of padding; that of the end of a sequence if the tokenizer has none."""
        pad = self._tokenizer.pad_token_id
        return self._eos if pad is None else pad
