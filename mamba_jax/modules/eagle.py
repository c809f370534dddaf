"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): a small transformer that drafts from a model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import EagleConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import RMSNorm
from mamba_jax.modules.drafter import DrafterFrame, feed
from mamba_jax.modules.mlp import MLP
from mamba_jax.sharding.across import ShardedModule, across


class EagleLayer(nnx.Module):
    """A pre-norm transformer layer with causal attention. The first reads pairs of an embedding and a hidden state."""

    def __init__(
        self, config: EagleConfig, target: HybridConfig, *, first: bool, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        size = config.hidden_size
        self.config, self.target = config, target
        attention = replace(config.attention, input_size=2 * size) if first else config.attention
        self.attention_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, config.norm_eps, dtype=dtype) if first else None
        self.attention = Attention(attention, size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.mlp = MLP(config.mlp, size, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], embedded: Float[Array, "T hidden"], layout: Layout, kv: Array | None
    ) -> tuple[Float[Array, "T hidden"], Array | None]:
        """Returns the hidden states, and the keys and values of this layer; `embedded` is for the first layer only."""
        if self.hidden_norm is None:
            read = self.attention_norm(x)
        else:
            normed = self.hidden_norm(x)
            read = jnp.concatenate([self.attention_norm(embedded), normed], axis=-1)
            x = normed if self.config.normed_residual else x
        attention = ShardedModule(self.attention, self.config.attention.parameters())
        state = None if kv is None else {"draft_kv": kv}
        y, state = across(self.target, {"mixer": attention}, _attend, layout, state, read)
        x = x + y.astype(x.dtype)
        mlp = ShardedModule(self.mlp, self.config.mlp.parameters())
        y, _ = across(self.target, {"mixer": mlp}, feed, layout, None, self.mlp_norm(x))
        return x + y.astype(x.dtype), None if state is None else state["draft_kv"]


def _attend(modules: Any, layout: Layout, state: Any, x: Array) -> tuple[Array, Any]:
    y, kv = modules["mixer"](x, layout, None if state is None else state["draft_kv"], first_key=1)
    return y, None if state is None else {"draft_kv": kv}


class Eagle(DrafterFrame):
    """The drafter of EAGLE-3. It reads pairs: a token, and a hidden state of the token before it.

    That hidden state is a projection of the target's hidden states at `config.places` or, for the tokens that the
    drafter has drafted itself, the output of its last layer. Keys and values are kept under the index of the token, as
    those of `MTP` are.
    """

    def __init__(self, config: EagleConfig, target: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        super().__init__(config, target, rngs=rngs, dtype=dtype)
        inputs = len(config.places) * target.hidden_size
        self.states_norm = RMSNorm(inputs, config.norm_eps, dtype=dtype) if config.norms_states else None
        self.layers = nnx.List(
            [EagleLayer(config, target, first=i == 0, rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        )

    def features(self, states: Sequence[Float[Array, "T hidden"]]) -> Float[Array, "T hidden"]:
        """Returns the hidden states that the drafter reads, from those of the target at each of the places."""
        joined = jnp.concatenate(states, axis=-1).astype(self.final_norm.weight.get_value().dtype)
        return self.fc(joined if self.states_norm is None else self.states_norm(joined))

    def __call__(
        self,
        embedded: Float[Array, "T hidden"],
        hidden: Float[Array, "T hidden"],
        layout: Layout,
        kv: tuple[Array, ...] | None,
    ) -> tuple[Float[Array, "T hidden"], tuple[Array, ...] | None]:
        """Predicts the token after each token of the layout; arguments and result are those of `MTP`.

        The result is before the final norm, which `HybridModel.draft_logits` applies.
        """
        x = hidden
        kept: list[Any] = []
        for i, layer in enumerate(self.layers):
            x, own = layer(x, embedded, layout, None if kv is None else kv[i])
            kept.append(own)
        return x, None if kv is None else tuple(kept)
