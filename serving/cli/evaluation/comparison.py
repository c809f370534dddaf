"""Comparison of two models' predictions on a text, for example of a quantized model and its original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mamba_jax.model import HybridModel


@dataclass(frozen=True)
class Comparison:
    """A model compared with a reference, over the tokens of a text."""

    tokens: int
    kl: float
    """Kullback-Leibler divergence of the reference's distribution from the model's: mean over all tokens, in nats."""
    largest_kl: float
    """Largest divergence of one token, in nats."""
    agreement: float
    """Fraction of tokens after which both models have the same likeliest token."""
    nats: float
    """Negative log-likelihood of the next token under the model, in nats: mean over all tokens."""
    reference_nats: float
    """The same under the reference."""


def compare(
    model: HybridModel, reference: HybridModel, tokens: Sequence[int], *, window: int = 512, batch: int = 4
) -> Comparison:
    """Compares the predictions of two models with the same vocabulary.

    Args:
        model: the model to evaluate.
        reference: the reference model.
        tokens: the text; it is cut into windows, and each is predicted separately.
        window: tokens per window.
        batch: windows per batch.
    Raises:
        ValueError: the vocabularies have different sizes, or the text has fewer than two tokens.
    """
    if model.config.vocab_size != reference.config.vocab_size:
        raise ValueError(
            f"vocabularies of {model.config.vocab_size} and {reference.config.vocab_size} tokens cannot be compared"
        )
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; at least 2 are needed")
    window = min(window, len(tokens))
    count = -(-len(tokens) // window)
    rows = np.zeros((-(-count // batch) * batch, window), np.int32)
    rows.reshape(-1)[: len(tokens)] = tokens
    lengths = np.clip(len(tokens) - window * np.arange(len(rows)), 0, window)
    parts = [
        jax.device_get(_compare(model, reference, rows[i : i + batch], lengths[i : i + batch]))
        for i in range(0, len(rows), batch)
    ]
    kl, agree, own, other = (np.concatenate([part[n] for part in parts]) for n in range(4))
    present = np.arange(window) < lengths[:, None]
    followed = present[:, 1:]
    return Comparison(
        tokens=len(tokens),
        kl=float(kl[present].mean()),
        largest_kl=float(kl[present].max()),
        agreement=float(agree[present].mean()),
        nats=float(own[followed].mean()),
        reference_nats=float(other[followed].mean()),
    )


@jax.jit
def _compare(
    model: HybridModel, reference: HybridModel, tokens: Int[Array, "batch window"], lengths: Int[Array, " batch"]
) -> tuple[
    Float[Array, "batch window"], Float[Array, "batch window"], Float[Array, "batch rest"], Float[Array, "batch rest"]
]:
    """Returns divergence and agreement for each token, and both models' negative log-likelihoods for each next
    token."""
    own, right = (jax.nn.log_softmax(each(tokens, lengths)) for each in (model, reference))
    divergence = (jnp.exp(right) * (right - own)).sum(-1)
    agree = (own.argmax(-1) == right.argmax(-1)).astype(jnp.float32)
    next_token = tokens[:, 1:, None]
    surprise = [-jnp.take_along_axis(each[:, :-1], next_token, axis=-1)[..., 0] for each in (own, right)]
    return divergence, agree, surprise[0], surprise[1]
