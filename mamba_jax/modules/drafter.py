"""Drafters: small transformers that draft from the hidden states of another model, the target.

EAGLE-3 (Li et al., 2025, arXiv:2503.01840) drafts token by token; DFlash (Chen et al., 2026, arXiv:2602.06036) and
DSpark (DeepSeek, 2026) draft a block at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import BlockConfig, DrafterConfig, EagleConfig
from mamba_jax.layout import BlockLayout, DecodeLayout, Hidden, Layout, PrefillLayout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import Linear, RMSNorm, Table, initial, normal
from mamba_jax.modules.feed_forward import MLP
from mamba_jax.sharding.across import ShardedModule, across, run_mixer
from mamba_jax.sharding.axis import split_last

LayersKV = tuple[Array, ...] | None
"""Keys and values of each layer; None without a store."""


class DrafterFrame(nnx.Module):
    """The parts of a drafter around its layers: the projection of the target's hidden states, tables and final norm."""

    def __init__(self, config: DrafterConfig, target: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        size = config.hidden_size
        self.target, self.places = target, config.places
        self.fc = Linear(len(config.places) * target.hidden_size, size, rngs=rngs, dtype=dtype)
        self.final_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        embed, head = (target.vocab_size, size), (config.vocab_size, size)
        self.embed = Table(normal(rngs, embed, dtype)) if config.own_embedding else None
        self.lm_head = Table(normal(rngs, head, dtype)) if config.own_head else None
        self.tokens = nnx.Param(_tokens(config.vocab_size)) if config.maps_vocabulary else None

    def joined(self, states: Sequence[Hidden]) -> Hidden:
        """Returns the target's hidden states at all of the places, in the drafter's dtype."""
        return jnp.concatenate(states, axis=-1).astype(self.final_norm.weight.get_value().dtype)


def _tokens(count: int) -> Array:
    return initial((count,), jnp.int32, lambda: jnp.arange(count))


class DrafterLayer(nnx.Module):
    """A pre-norm transformer layer. With `pairs`, it reads pairs of an embedding and a hidden state."""

    def __init__(
        self, config: DrafterConfig, target: HybridConfig, *, pairs: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        size = config.hidden_size
        self.config, self.target = config, target
        attention = replace(config.attention, input_size=2 * size) if pairs else config.attention
        self.attention_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, config.norm_eps, dtype=dtype) if pairs else None
        self.attention = Attention(attention, size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.mlp = MLP(config.mlp, size, rngs=rngs, dtype=dtype)

    def run(
        self, x: Hidden, read: Float[Array, "T inputs"], layout: Any, kv: Array | None, first_key: int
    ) -> tuple[Hidden, Array | None]:
        """Returns the hidden states, and the keys and values of this layer.

        Args:
            x: what the sublayers add to.
            read: what attention reads.
            first_key: see `Attention`.
        """

        def attend(modules: Any, layout: Any, state: Any, read: Array) -> tuple[Array, Any]:
            y, kv = modules["mixer"](read, layout, None if state is None else state["draft_kv"], first_key=first_key)
            return y, None if state is None else {"draft_kv": kv}

        state = None if kv is None else {"draft_kv": kv}
        y, state = across(self.target, {"mixer": self.sharded_attention}, attend, layout, state, read)
        x = x + y.astype(x.dtype)
        y, _ = run_mixer(self.target, self.mlp, self.config.mlp.parameters(), layout, None, self.mlp_norm(x))
        return x + y.astype(x.dtype), None if state is None else state["draft_kv"]

    @property
    def sharded_attention(self) -> ShardedModule:
        """The attention, as `across` takes it."""
        return ShardedModule(self.attention, self.config.attention.parameters())


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

    def features(self, states: Sequence[Hidden]) -> Hidden:
        """Returns the hidden states that the drafter reads, from those of the target at each of the places."""
        joined = self.joined(states)
        return self.fc(joined if self.states_norm is None else self.states_norm(joined))

    def __call__(self, embedded: Hidden, hidden: Hidden, layout: Layout, kv: LayersKV) -> tuple[Hidden, LayersKV]:
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

    def features(self, states: Sequence[Hidden]) -> Hidden:
        """Returns what keys and values are made of, from the target's hidden states at each of the places."""
        return self.states_norm(self.fc(self.joined(states)))

    def remember(self, read: Hidden, layout: DecodeLayout | PrefillLayout, kv: tuple[Array, ...]) -> tuple[Array, ...]:
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
        self, embedded: Hidden, layout: BlockLayout, kv: tuple[Array, ...]
    ) -> tuple[Hidden, tuple[Array, ...]]:
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
