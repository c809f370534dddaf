"""DFlash (Chen et al., 2026, arXiv:2602.06036) and DSpark (DeepSeek, 2026): transformers that draft a block at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import BlockConfig
from mamba_jax.layout import BlockLayout, DecodeLayout, PrefillLayout
from mamba_jax.modules.basic import RMSNorm, Table, normal
from mamba_jax.modules.drafter import DrafterFrame, DrafterLayer
from mamba_jax.sharding.across import across
from mamba_jax.sharding.axis import split_last


class BlockDrafter(DrafterFrame):
    """Drafts a block in one pass, from the target's hidden states of all tokens before it.

    Keys and values of a token that the target has read are projections of its hidden states, under the token's index
    and at its position. Those of a block's tokens follow them, until the target's replace them.
    """

    def __init__(self, config: BlockConfig, target: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        super().__init__(config, target, rngs=rngs, dtype=dtype)
        rank = config.markov_rank
        self.states_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.layers = nnx.List([DrafterLayer(config, target, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.markov_before = Table(normal(rngs, (target.vocab_size, rank), dtype)) if rank else None
        self.markov_after = Table(normal(rngs, (config.vocab_size, rank), dtype)) if rank else None

    def features(self, states: Sequence[Float[Array, "T hidden"]]) -> Float[Array, "T hidden"]:
        """Returns what keys and values are made of, from the target's hidden states at each of the places."""
        joined = jnp.concatenate(states, axis=-1).astype(self.final_norm.weight.get_value().dtype)
        return self.states_norm(self.fc(joined))

    def remember(
        self, read: Float[Array, "T hidden"], layout: DecodeLayout | PrefillLayout, kv: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        """Returns the pages of each layer with the keys and values of the layout's tokens, from their `features`."""

        def write(modules: Any, layout: Any, state: Any, read: Array) -> tuple[Array, Any]:
            k, v = modules["mixer"].keys_values(read, layout)
            return jnp.zeros(0, read.dtype), {"draft_kv": layout.write_kv(k, v, state["draft_kv"])}

        found = []
        for layer, own in zip(self.layers, kv, strict=True):
            attention = {"mixer": layer.sharded_attention}
            _, state = across(layer.target, attention, write, layout, {"draft_kv": own}, read)
            found.append(state["draft_kv"])
        return tuple(found)

    def __call__(
        self, embedded: Float[Array, "T hidden"], layout: BlockLayout, kv: tuple[Array, ...]
    ) -> tuple[Float[Array, "T hidden"], tuple[Array, ...]]:
        """Returns the output at each token of a block, before the final norm, and the keys and values."""
        x, kept = embedded, list[Any]()
        for layer, own in zip(self.layers, kv, strict=True):
            x, state = layer.run(x, layer.attention_norm(x), layout, own, first_key=0)
            kept.append(state)
        return x, tuple(kept)

    def following(self, tokens: Int[Array, " rows"]) -> Float[Array, "rows vocab"] | float:
        """Returns what DSpark adds to the logits (float32) of the token after each token; 0 for DFlash."""
        if self.markov_before is None or self.markov_after is None:
            return 0.0
        dtype = self.final_norm.weight.get_value().dtype
        return split_last(self.markov_after.scores(self.markov_before.rows(tokens, dtype)))
