"""The training loss: the cross-entropy of the next token, and of each draft of the multi-token-prediction layer.

The draft layer is unrolled over whole sequences; each draft attends to the same keys as in serving. Also the loss of
held-out sequences, without drafts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from mamba_jax.config import LATENT, HybridConfig, ModelConfigError, need
from mamba_jax.layout import PackedLayout, SequenceLayout, Span
from mamba_jax.layout.base import Keys, Queries
from mamba_jax.model import HybridModel, parameters
from mamba_jax.train.additions import attach, divide
from mamba_jax.train.config import DraftSettings
from mamba_jax.train.data import DocumentBounds, TokenStream
from mamba_jax.train.head_loss import distillation, mean_cross_entropy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolloutLayout(SequenceLayout):
    """Draft number n (from 0) of every token at once.

    When serving, the layer drafts from token p on: its keys up to p come from the model's hidden states, and those of
    p + 1 to p + n from its own. Draft n at token j therefore sees the keys of pass 0 up to j - n, and of each later
    pass e the one key at j - n + e.

    State: the keys and values of all passes so far, [passes, 2, T, kv_heads, head_dim].
    """

    def attend(self, q: Queries, k: Keys, v: Any, kv: Any, span: Span) -> tuple[Queries, Any]:
        depth = kv.shape[0]
        kv = jnp.concatenate([kv, jnp.stack([k, v])[None]])
        if depth == 0:
            out, _ = super().attend(q, k, v, None, span)
            return out, kv
        kv_heads, head_dim = k.shape[1:]
        queries = q.reshape(self.batch, self.length, kv_heads, -1, head_dim)
        passes = kv.reshape(depth + 1, 2, self.batch, self.length, kv_heads, head_dim)
        place = jnp.arange(self.length)
        seen = (place[None] <= place[:, None] - depth) & (place[None] >= span.first_key)
        if span.window is not None:
            seen &= place[None] > place[:, None] - span.window
        scores = jnp.einsum("bqhrd,bkhd->bhrqk", queries, passes[0, 0], preferred_element_type=jnp.float32)
        scores = jnp.where(seen, scores * span.scale, -jnp.inf)
        # The one key of each later pass, shifted to the query's position.
        later = [jnp.roll(passes[e], depth - e, axis=2) for e in range(1, depth + 1)]
        own = jnp.stack([jnp.einsum("bqhrd,bqhd->bhrq", queries, one[0]) for one in later], axis=-1)
        weights = jax.nn.softmax(jnp.concatenate([scores, own.astype(jnp.float32) * span.scale], axis=-1), axis=-1)
        weights = weights.astype(v.dtype)
        out = jnp.einsum("bhrqk,bkhd->bqhrd", weights[..., : self.length], passes[0, 1])
        for e, one in enumerate(later):
            out += jnp.einsum("bhrq,bqhd->bqhrd", weights[..., self.length + e], one[1])
        return out.reshape(q.shape), kv


def rollout(
    model: HybridModel, tokens: Int[Array, "batch length"], hidden: Float[Array, "batch length hidden"], depth: int
) -> list[Float[Array, "batch length hidden"]]:
    """Returns the draft layer's hidden states, pass by pass.

    Args:
        tokens: whole sequences.
        hidden: the model's hidden states, after the final norm.
        depth: number of successive drafts.
    Returns:
        For each pass n, states whose logits predict the token after each token, n + 1 drafts after the last token that
        the model has seen. The first n + 1 of each sequence are undefined, because no pair exists for them.
    """
    assert model.mtp is not None
    batch, length = tokens.shape
    layout = RolloutLayout.of(batch, length)
    embedded = model.draft_embedded(tokens.reshape(-1))
    kv: tuple[Array, ...] = ()
    if count := model.config.num_mtp_attention_layers:
        kv2, head_dim = need(model.config.attention).state()[0].shape
        kv = (jnp.zeros((0, 2, batch * length, kv2 // 2, head_dim), hidden.dtype),) * count
    passes = []
    for _ in range(depth):
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        flat, new = model.mtp(embedded, before.reshape(batch * length, -1), layout, kv)
        hidden, kv = flat.reshape(hidden.shape), new if new is not None else kv
        passes.append(hidden)
    return passes


Parameters = dict[str, Array]
"""Weights by dotted path, as in `mamba_jax.model.parameters`."""
DRAFT_LAYER = "mtp."
"""Prefix of the paths of the draft layer's weights."""


def build(config: HybridConfig, values: Mapping[str, Array], dtype: DTypeLike) -> HybridModel:
    """Returns the model with these weights in `dtype`, except for those that are always float32."""
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
    rematerialize: bool = False,
    balance_experts: float = 0.0,
    bounds: DocumentBounds | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the loss of a batch, and its parts.

    Args:
        values: float32 weights, and what is trained in addition (see `mamba_jax.train.additions`).
        tokens: sequences with one token more than the model is run over. Where `bounds` is given, the first token of
            each document is marked (see `mamba_jax.train.data`).
        config: the model's configuration.
        drafts: settings of the draft layer's training, if there is one.
        dtype: dtype of the products.
        model_weight: weight of the next token's loss; 0 trains only the draft layer.
        rematerialize: see `HybridModel.run`.
        balance_experts: see `MoEConfig.balance`; the gradient has this loss, the returned loss does not.
        bounds: at least the documents that `tokens` has; they do not see each other, and the first token of a
            document is no target.
    Returns:
        The loss; and `loss` (of the next token, if it has any weight), for each draft n from 1 `draft_loss_n` and
        `draft_agreement_n`, the share of places where its first choice is the model's.
    Raises:
        ModelConfigError: see `refuse_untrainable`.
    """
    refuse_untrainable(config, drafts, separate=bounds is not None)
    if balance_experts and config.moe is not None:
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, balance=balance_experts))
    values, added = divide(values)
    model = build(config, values, dtype)
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    if bounds is None:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        layout = SequenceLayout.of(batch, length)
    else:
        inputs, targets = jnp.maximum(tokens, ~tokens)[:, :-1], tokens[:, 1:]
        starts = (tokens[:, :-1] < 0).at[:, 0].set(True).reshape(-1)
        layout = PackedLayout.of_documents(starts, documents=bounds.documents, longest=bounds.longest)
    layout = attach(model, layout, added)
    flat, _ = model.run(inputs.reshape(-1), layout, None, rematerialize=rematerialize)
    hidden = flat.reshape(batch, length, flat.shape[1])
    total, parts = jnp.zeros(()), {}
    if model_weight:
        head = model.head.weight[...]
        parts["loss"] = mean_cross_entropy(hidden, head, targets, config.logits_multiplier)
        total = model_weight * parts["loss"]
    if config.mtp_pattern and drafts.depth_weights:
        chosen = slice(None, None, drafts.every)
        if drafts.detach:
            frozen = {p: v if p.startswith(DRAFT_LAYER) else jax.lax.stop_gradient(v) for p, v in values.items()}
            model, hidden = build(config, frozen, dtype), jax.lax.stop_gradient(hidden)
        extra, more = _draft_loss(model, inputs[chosen], targets[chosen], hidden[chosen], drafts)
        total, parts = total + extra, parts | more
    return total, parts


def refuse_untrainable(config: HybridConfig, drafts: DraftSettings, *, separate: bool) -> None:
    """Raises ModelConfigError if the loss does not have what a model or its drafts need.

    `separate`: documents do not see each other.
    """
    if config.logits_soft_cap is not None:
        raise ModelConfigError(f"training is not supported with logits_soft_cap {config.logits_soft_cap}")
    if not config.mtp_pattern or not drafts.depth_weights:
        return
    if separate:
        raise ModelConfigError(
            "data.separate_documents: a draft layer needs joined documents; set drafts.depth_weights=[]"
        )
    if LATENT in config.mtp_pattern:
        raise ModelConfigError(
            "training is not supported for a draft layer with attention over latents; set drafts.depth_weights=[]"
        )


def _draft_loss(
    model: HybridModel, inputs: Array, targets: Array, hidden: Array, drafts: DraftSettings
) -> tuple[Array, dict[str, Array]]:
    weights = jnp.asarray(drafts.depth_weights)
    passes = rollout(model, inputs, hidden, len(weights))
    if drafts.targets == "model" and drafts.detach and not model.config.own_mtp_head:
        losses, agreements = distillation(
            jnp.stack(passes), hidden, model.head.weight[...], model.config.logits_multiplier
        )
    else:
        losses, agreements = _each_draft(model, passes, targets, hidden, drafts)
    parts = {f"draft_loss_{n + 1}": losses[n] for n in range(len(weights))}
    parts |= {f"draft_agreement_{n + 1}": agreements[n] for n in range(len(weights))}
    return (weights * losses).sum(), parts


def _each_draft(
    model: HybridModel, passes: list[Array], targets: Array, hidden: Array, drafts: DraftSettings
) -> tuple[Array, Array]:
    """Loss and agreement of each draft, with a gradient for the head's weights."""
    guide = jax.lax.stop_gradient(model.logits(hidden))
    best, losses, agreements = guide.argmax(-1), [], []
    for n, state in enumerate(passes):
        first = n + 1  # there is no pair for the tokens before
        logits = model.draft_logits(state[:, first:])
        if drafts.targets == "model":
            loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(guide[:, first:])).mean()
        else:
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets[:, first:]).mean()
        losses.append(loss)
        agreements.append((logits.argmax(-1) == best[:, first:]).mean())
    return jnp.stack(losses), jnp.stack(agreements)


def validation_sequences(
    streams: Mapping[str, TokenStream], *, length: int, limit: int, separate: bool = False
) -> Int32[np.ndarray, "windows length"]:
    """Sequences that do not overlap, spread evenly over all streams.

    Args:
        streams: the validation data by source.
        length: tokens in a sequence.
        limit: maximum number of sequences.
        separate: mark the first token of each document.
    Raises:
        ModelConfigError: no stream is as long as a sequence.
    """
    places = [(name, start) for name in sorted(streams) for start in streams[name].windows(length, 0)]
    if not places:
        raise ModelConfigError(
            f"the validation data has no sequence of {length} tokens: give more with --validation, use a shorter"
            " sequence_length, or set data.held_out to 0 to train without it"
        )
    chosen = np.linspace(0, len(places) - 1, min(limit, len(places))).round().astype(int)
    return np.stack([streams[places[i][0]].sequence(places[i][1], length, separate=separate) for i in chosen])


class Validation:
    """Computes the mean loss of the next token over the same sequences each time.

    Args:
        sequences: one token longer than what the model is run over.
        batch_size: maximum number of sequences that are computed together.
        config: the model's configuration.
        dtype: dtype of the products.
        sharding: divides the sequences of a batch among `devices` devices.
    Raises:
        ModelConfigError: there are fewer sequences than devices.
    """

    def __init__(
        self,
        sequences: Int32[np.ndarray, "windows length"],
        *,
        batch_size: int,
        config: HybridConfig,
        dtype: DTypeLike,
        sharding: Sharding,
        devices: int,
    ) -> None:
        if len(sequences) < devices:
            raise ModelConfigError(
                f"the validation data has {len(sequences)} sequences: at least one for each of {devices} devices"
                " is expected"
            )
        # The last batch may be smaller; what its devices cannot share equally is left out.
        batches = [sequences[i : i + batch_size] for i in range(0, len(sequences), batch_size)]
        cut = [batch[: len(batch) // devices * devices] for batch in batches]
        self._batches, self._sharding = [batch for batch in cut if len(batch)], sharding
        no_drafts = DraftSettings(depth_weights=())
        self._loss = jax.jit(
            functools.partial(training_loss, config=config, drafts=no_drafts, dtype=dtype), static_argnames="bounds"
        )

    def loss(self, values: Parameters) -> float:
        """Returns the mean over all tokens, in nats."""
        total, count = 0.0, 0
        for batch in self._batches:
            targets = int((batch[:, 1:] >= 0).sum())
            tokens = jax.device_put(batch, self._sharding)
            total += targets * float(self._loss(values, tokens, bounds=DocumentBounds.of(batch[None]))[0])
            count += targets
        return total / count
