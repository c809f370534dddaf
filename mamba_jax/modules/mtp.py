"""The multi-token-prediction layer: a small model that drafts the token after next (DeepSeek-V3, section 2.2)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import ATTENTION, LATENT, HybridConfig
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.basic import Linear, Table, normal
from mamba_jax.modules.blocks import Block, model_norm
from mamba_jax.modules.drafter import LayersKV
from mamba_jax.sharding.across import ShardedModule, across, own_columns
from mamba_jax.sharding.parameters import of_whole_input


class MTP(nnx.Module):
    """Fuses the hidden state of token i with the embedding of token i + 1, then runs the sublayers of `mtp_pattern`.

    Embedding and head are the model's, unless a checkpoint has others for the layer (`embed`, `lm_head`). Keys and
    values are kept under the index of the *token*, i + 1, so that a page depends on nothing but the tokens it holds;
    index 0 has no pair and stays hidden. Rotary positions, where used, are still those of the pair, i.
    """

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        hidden = config.hidden_size
        self.config, self.kinds = config, config.mtp_pattern
        table = (config.vocab_size, hidden)
        self.embed = Table(normal(rngs, table, dtype)) if config.own_mtp_embedding else None
        self.lm_head = Table(normal(rngs, table, dtype)) if config.own_mtp_head else None
        self.enorm = model_norm(config, dtype=dtype)
        self.hnorm = model_norm(config, dtype=dtype)
        self.eh_proj = Linear(2 * hidden, hidden, rngs=rngs, dtype=dtype)
        self.blocks = nnx.List(
            [
                Block(kind, config, index=(config.pattern + self.kinds[:i]).count(kind), rngs=rngs, dtype=dtype)
                for i, kind in enumerate(self.kinds)
            ]
        )
        self.final_norm = model_norm(config, dtype=dtype)

    def __call__(self, embedded: Hidden, hidden: Hidden, layout: Layout, kv: LayersKV) -> tuple[Hidden, LayersKV]:
        """Predicts the token after each token of the layout.

        Args:
            embedded: embeddings of the layout's tokens, at their own positions i + 1.
            hidden: what the model (or, when drafting further, this layer) gave for the tokens before them, after the
                final norm.
            kv: this layer's keys and values, one array for each of its attentions; None without a store.
        Returns:
            hidden states for the head (`HybridModel.draft_logits`), and the keys and values.
        """
        pair = jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1)
        eh_proj = ShardedModule(self.eh_proj, of_whole_input(self.config))
        x, _ = across(self.config, {"eh_proj": eh_proj}, _fuse, layout, None, pair)
        kept: list[Array] = []
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind in (ATTENTION, LATENT):
                x, state = block(x, layout, None if kv is None else kv[len(kept)], first_key=1)
                kept.append(state)
            else:
                x, _ = block(x, layout, None)
        return self.final_norm(x), None if kv is None else tuple(kept)


def _fuse(modules: Any, layout: Layout, state: None, pair: Float[Array, "T both"]) -> tuple[Array, None]:
    eh_proj = modules["eh_proj"]
    return eh_proj(own_columns(pair, eh_proj.weight.shape[1])), None
