"""The draft layer, unrolled over whole sequences. Each draft attends to the same keys as in serving."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.config import HybridConfig, need
from mamba_jax.layout import SequenceLayout, Span
from mamba_jax.layout.base import Keys, Queries
from mamba_jax.model import HybridModel


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
    kv = _no_keys(model.config, batch * length, hidden.dtype)
    passes = []
    for _ in range(depth):
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        flat, new = model.mtp(embedded, before.reshape(batch * length, -1), layout, kv)
        hidden, kv = flat.reshape(hidden.shape), new if new is not None else kv
        passes.append(hidden)
    return passes


def _no_keys(config: HybridConfig, tokens: int, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Returns the state of the layer's attentions before the first pass."""
    if not config.num_mtp_attention_layers:
        return ()
    kv2, head_dim = need(config.attention).state()[0].shape
    return (jnp.zeros((0, 2, tokens, kv2 // 2, head_dim), dtype),) * config.num_mtp_attention_layers
