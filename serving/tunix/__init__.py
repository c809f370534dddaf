"""Tunix, a library for reinforcement learning: this engine as its rollout (`rollout`), and what its trainers call here:
a model and a tokenizer of this library, which need no Tunix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from checkpoints.tokenizer import Tokenizer
from mamba_jax.model import HybridModel


class TunixActor(nnx.Module):
    """Wraps a model for Tunix's trainers, as actor or reference.

    Tunix pads prompts on the left and answers on the right. A recurrence reads every token, so this class moves the
    padding of each sequence behind its tokens before it runs the model, and moves the logits back.

    Args:
        model: the model. The trainer donates its arrays: do not share them with an engine.
    """

    def __init__(self, model: HybridModel) -> None:
        self.model = model

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        positions: Int[Array, "batch length"] | None = None,
        cache: Any = None,
        attention_mask: Bool[Array, "batch length length"] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], None]:
        """Returns logits (float32) for the token after each token, and None in place of a cache.

        Args:
            tokens: whole sequences; padding may be on both sides.
            positions: not used, because the model counts the tokens that are not padding.
            cache: must be None; sampling is the engine's part.
            attention_mask: causal mask. A token that is masked from itself is padding. None: no token is padding.
        Raises:
            ValueError: a cache is given, or the mask has a wrong shape.
        """
        del positions
        if cache is not None:
            raise ValueError("TunixActor has no cache: use TunixRollout as rollout_engine, not 'vanilla'")
        if attention_mask is None:
            return self.model(tokens), None
        if attention_mask.shape != (*tokens.shape, tokens.shape[1]):
            expected = [*tokens.shape, tokens.shape[1]]
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}: expected {expected}")
        valid = jnp.diagonal(attention_mask, axis1=1, axis2=2).astype(bool)
        order = jnp.argsort(~valid, axis=1, stable=True)
        packed = jnp.take_along_axis(tokens, order, axis=1)
        logits = self.model(packed, valid.sum(axis=1))
        return jnp.take_along_axis(logits, jnp.argsort(order, axis=1)[..., None], axis=1), None


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
