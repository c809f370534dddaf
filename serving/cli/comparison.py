"""How far a model's predictions are from another's on a text: a quantised one's from those of its wide original."""

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
    """Of a model with a reference, over the tokens of a text."""

    tokens: int
    kl: float
    """Kullback-Leibler divergence of the reference's distribution from the model's: nats, the mean of all tokens."""
    largest_kl: float
    """Of one token."""
    agreement: float
    """Share of the tokens after which both find the same token likeliest."""
    nats: float
    """Negative log-likelihood of the text's next token by the model, the mean of all tokens."""
    reference_nats: float
    """Likewise, by the reference."""


def compare(
    model: HybridModel, reference: HybridModel, tokens: Sequence[int], *, window: int = 512, batch: int = 4
) -> Comparison:
    """Compares what two models of one vocabulary predict.

    Args:
        model: whose predictions are judged.
        reference: whose predictions count as right.
        tokens: the text; cut into windows that are predicted each by itself.
        window: tokens in each.
        batch: windows at a time.
    Raises:
        ValueError: vocabularies of different sizes, or a text of fewer than two tokens.
    """
    if model.config.vocab_size != reference.config.vocab_size:
        raise ValueError(
            f"vocabularies of {model.config.vocab_size} and {reference.config.vocab_size} tokens cannot be compared"
        )
    if len(tokens) < 2:
        raise ValueError(f"a text of {len(tokens)} tokens: at least 2 are needed")
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
    there = np.arange(window) < lengths[:, None]
    followed = there[:, 1:]
    return Comparison(
        tokens=len(tokens),
        kl=float(kl[there].mean()),
        largest_kl=float(kl[there].max()),
        agreement=float(agree[there].mean()),
        nats=float(own[followed].mean()),
        reference_nats=float(other[followed].mean()),
    )


@jax.jit
def _compare(
    model: HybridModel, reference: HybridModel, tokens: Int[Array, "batch window"], lengths: Int[Array, " batch"]
) -> tuple[
    Float[Array, "batch window"], Float[Array, "batch window"], Float[Array, "batch rest"], Float[Array, "batch rest"]
]:
    """After each token: the divergence, whether both agree; and of each next token, both models' surprise."""
    own, right = (jax.nn.log_softmax(each(tokens, lengths)) for each in (model, reference))
    divergence = (jnp.exp(right) * (right - own)).sum(-1)
    agree = (own.argmax(-1) == right.argmax(-1)).astype(jnp.float32)
    next_token = tokens[:, 1:, None]
    surprise = [-jnp.take_along_axis(each[:, :-1], next_token, axis=-1)[..., 0] for each in (own, right)]
    return divergence, agree, surprise[0], surprise[1]
