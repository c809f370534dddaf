"""What is minimised: the cross-entropy of the next token, and of every draft of the multi-token-prediction layer."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import HybridConfig
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.train.config import DraftSettings
from mamba_jax.train.rollout import rollout

Parameters = dict[str, Array]
"""Weights by dotted path, as in `mamba_jax.model.parameters`."""
DRAFT_LAYER = "mtp."
"""What the paths of the draft layer's weights begin with."""


def build(config: HybridConfig, values: Mapping[str, Array], dtype: DTypeLike) -> HybridModel:
    """The model with these weights, in `dtype` (what is always float32 stays so)."""
    kinds = parameters(HybridModel.abstract(config, dtype=dtype))
    return HybridModel.from_parameters(config, {path: v.astype(kinds[path].dtype) for path, v in values.items()})


def training_loss(
    values: Parameters,
    tokens: Int[Array, "batch length_1"],
    *,
    config: HybridConfig,
    drafts: DraftSettings,
    dtype: DTypeLike,
    model_weight: float = 1.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of a batch, and its parts.

    Args:
        values: float32 weights.
        tokens: sequences with one token more than the model is run over.
        config: of the model.
        drafts: how the draft layer, if there is one, is trained.
        dtype: of the products.
        model_weight: of the next token's loss; 0 trains the draft layer alone.
    Returns:
        The loss; and `loss` (of the next token), for each draft n from 1 `draft_loss_n` and `draft_agreement_n`, the
        share of places where its first choice is the model's.
    """
    model = build(config, values, dtype)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    flat, _ = model.hidden(inputs.reshape(-1), SequenceLayout.of(batch, length), None)
    hidden = flat.reshape(batch, length, -1)
    logits = model.logits(hidden)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    total, parts = model_weight * loss, {"loss": loss}
    if config.mtp_pattern and drafts.depth_weights:
        chosen = slice(None, None, drafts.every)
        if drafts.detach:
            frozen = {p: v if p.startswith(DRAFT_LAYER) else jax.lax.stop_gradient(v) for p, v in values.items()}
            model, hidden = build(config, frozen, dtype), jax.lax.stop_gradient(hidden)
        guide = jax.lax.stop_gradient(logits[chosen])
        extra, more = _draft_loss(model, inputs[chosen], targets[chosen], hidden[chosen], guide, drafts)
        total, parts = total + extra, parts | more
    return total, parts


def _draft_loss(
    model: HybridModel, inputs: Array, targets: Array, hidden: Array, guide: Array, drafts: DraftSettings
) -> tuple[Array, dict[str, Array]]:
    total, parts = jnp.zeros(()), {}
    best = guide.argmax(-1)
    for n, state in enumerate(rollout(model, inputs, hidden, len(drafts.depth_weights))):
        first = n + 1  # there is no pair for the tokens before
        logits = model.logits(state[:, first:])
        if drafts.targets == "model":
            loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(guide[:, first:])).mean()
        else:
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets[:, first:]).mean()
        total += drafts.depth_weights[n] * loss
        parts[f"draft_loss_{n + 1}"] = loss
        parts[f"draft_agreement_{n + 1}"] = (logits.argmax(-1) == best[:, first:]).mean()
    return total, parts
