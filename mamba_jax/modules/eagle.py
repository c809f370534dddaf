"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): a small transformer that drafts from a model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import EagleConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import RMSNorm
from mamba_jax.modules.drafter import DrafterFrame, DrafterLayer


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
        self.adds_to_norm = config.normed_residual
        self.layers = nnx.List(
            [DrafterLayer(config, target, pairs=i == 0, rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
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
        x, kept = hidden, list[Any]()
        for i, layer in enumerate(self.layers):
            if layer.hidden_norm is None:
                read = layer.attention_norm(x)
            else:
                normed = layer.hidden_norm(x)
                read = jnp.concatenate([layer.attention_norm(embedded), normed], axis=-1)
                x = normed if self.adds_to_norm else x
            x, own = layer.run(x, read, layout, None if kv is None else kv[i], first_key=1)
            kept.append(own)
        return x, None if kv is None else tuple(kept)
