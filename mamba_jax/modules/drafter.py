"""What drafts from a model's hidden states: its multi-token-prediction layer (DeepSeek-V3, section 2.2), or a drafter.

A drafter is a separate small transformer; the model is its target.
EAGLE-3 (Li et al., 2025, arXiv:2503.01840) drafts token by token; DFlash (Chen et al., 2026, arXiv:2602.06036) and
DSpark (DeepSeek, 2026) draft a block at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import ATTENTION, LATENT, HybridConfig
from mamba_jax.config.drafter import BlockConfig, DrafterConfig, EagleConfig
from mamba_jax.layout import BlockLayout, DecodeLayout, Hidden, Layout, PrefillLayout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import Linear, RMSNorm, Table, initial, normal
from mamba_jax.modules.blocks import Block, model_norm
from mamba_jax.modules.feed_forward import MLP
from mamba_jax.sharding.across import ShardedModule, across, project_whole, run_mixer
from mamba_jax.sharding.axis import keep_whole, split_last

LayersKV = tuple[Array, ...] | None
"""Keys and values of each layer; None without a store."""


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
        places = range(len(config.pattern), len(config.pattern + self.kinds))
        self.blocks = nnx.List([Block(config, place, rngs=rngs, dtype=dtype) for place in places])
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
        x = project_whole(self.config, self.eh_proj, layout, pair)
        kept: list[Array] = []
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            if kind in (ATTENTION, LATENT):
                x, state = block(x, layout, None if kv is None else kv[len(kept)], first_key=1)
                kept.append(state)
            else:
                x, _ = block(x, layout, None)
        return self.final_norm(x), None if kv is None else tuple(kept)


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
        tokens = initial((config.vocab_size,), jnp.int32, lambda: jnp.arange(config.vocab_size))
        self.tokens = nnx.Param(tokens) if config.maps_vocabulary else None

    def joined(self, states: Sequence[Hidden]) -> Hidden:
        """Returns the target's hidden states at all of the places, in the drafter's dtype."""
        return jnp.concatenate(states, axis=-1).astype(self.final_norm.weight.get_value().dtype)


class GroupedConv(nnx.Module):
    """DFlash 2's causal convolutions over the tokens of a block, before and after a sublayer.

    Each channel has factors of its own (`base` [2, kernel, channels]). To them are added those of the channel's group,
    which the token at the sublayer's input determines (`projection` [2 kernel groups, channels]).
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        size, self.kernel = config.hidden_size, config.conv_kernel
        self.groups = size // config.conv_group
        self.base = nnx.Param(normal(rngs, (2, self.kernel, size), dtype))
        self.projection = Linear(size, 2 * self.kernel * self.groups, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T channels"], steps: int
    ) -> tuple[Float[Array, "T channels"], Callable[[Array], Array]]:
        """Returns the sublayer's input, and the function for its output. `steps`: tokens of each block."""
        factors = self.projection(x, out_dtype=jnp.float32).reshape(-1, steps, 2, self.kernel, self.groups, 1)
        base = self.base[...].astype(jnp.float32).reshape(2, self.kernel, self.groups, -1)

        def convolved(x: Array, part: int) -> Array:
            values = x.astype(jnp.float32).reshape(-1, steps, self.groups, base.shape[-1])
            total = jnp.zeros_like(values)
            for back in range(min(self.kernel, steps)):
                earlier = jnp.pad(values[:, : steps - back], ((0, 0), (back, 0), (0, 0), (0, 0)))
                total += (base[part, back] + factors[:, :, part, back]) * earlier
            return total.reshape(x.shape).astype(x.dtype)

        return convolved(x, 0), lambda y: convolved(y, 1)


class Selector(nnx.Module):
    """DFlash 2's candidate selector: scores of a token's candidates after the token before."""

    def __init__(self, config: BlockConfig, target: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        rank, self.top = config.selector_rank, config.selector_top
        self.hidden = Linear(config.hidden_size, rank, rngs=rngs, dtype=dtype)
        self.before = Table(normal(rngs, (target.vocab_size, rank), dtype))
        self.after = Table(normal(rngs, (config.vocab_size, rank), dtype))

    def __call__(
        self, logits: Float[Array, "rows vocab"], hidden: Hidden, before: Int[Array, " rows"]
    ) -> Float[Array, "rows vocab"]:
        """Returns the logits of the likeliest tokens with these scores; -inf for all others."""
        unary, candidates = lax.top_k(logits, self.top)
        read = self.before.rows(before, hidden.dtype) * self.hidden(hidden)
        after = self.after.rows(candidates.reshape(-1), jnp.float32).reshape(*candidates.shape, -1)
        scores = unary + jnp.einsum("br,bkr->bk", read.astype(jnp.float32), after, precision=lax.Precision.HIGHEST)
        rows = jnp.arange(len(logits))[:, None]
        return jnp.full(logits.shape, -jnp.inf).at[rows, candidates].set(scores)


class DrafterLayer(nnx.Module):
    """A pre-norm transformer layer. With `pairs`, it reads pairs of an embedding and a hidden state."""

    attention_conv: GroupedConv | None = None
    mlp_conv: GroupedConv | None = None

    def __init__(
        self, config: DrafterConfig, target: HybridConfig, *, pairs: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        size = config.hidden_size
        self.config, self.target = config, target
        if isinstance(config, BlockConfig) and config.conv_kernel:
            self.attention_conv = GroupedConv(config, rngs=rngs, dtype=dtype)
            self.mlp_conv = GroupedConv(config, rngs=rngs, dtype=dtype)
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

        state, finish = None if kv is None else {"draft_kv": kv}, None
        if self.attention_conv is not None:
            read, finish = self.attention_conv(read, layout.shape[1])
        y, state = across(self.target, {"mixer": self.sharded_attention}, attend, layout, state, read)
        x = x + (y if finish is None else finish(y)).astype(x.dtype)
        read = self.mlp_norm(x)
        if self.mlp_conv is not None:
            read, finish = self.mlp_conv(read, layout.shape[1])
        y, _ = run_mixer(self.target, self.mlp, self.config.mlp.parameters(), layout, None, read)
        return x + (y if finish is None else finish(y)).astype(x.dtype), None if state is None else state["draft_kv"]

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
        rank, self.config = config.markov_rank, config
        self.states_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.layers = nnx.List([DrafterLayer(config, target, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.markov_before = Table(normal(rngs, (target.vocab_size, rank), dtype)) if rank else None
        self.markov_after = Table(normal(rngs, (config.vocab_size, rank), dtype)) if rank else None
        inputs = config.hidden_size + rank * config.estimates_by_token
        self.confidence = Linear(inputs, 1, bias=True, rngs=rngs, dtype=dtype) if config.estimates else None
        self.selector = Selector(config, target, rngs=rngs, dtype=dtype) if config.selector_rank else None

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

    def following(
        self, logits: Float[Array, "rows vocab"], hidden: Hidden, before: Int[Array, " rows"]
    ) -> tuple[Float[Array, "rows vocab"], Float[Array, " rows"] | None]:
        """Returns the logits (float32) of the token after each token `before`, and how likely the largest is right,
        given that `before` is; None if the drafter does not estimate it.

        Args:
            logits: as the head gives them.
            hidden: the drafter's output that they are of, before the final norm.
        """
        config, hidden = self.config, self.final_norm(hidden)
        if config.logit_multiplier != 1.0:
            logits = logits * config.logit_multiplier
        if config.logit_cap:
            logits = jnp.tanh(logits / config.logit_cap) * config.logit_cap
        known = None if self.markov_before is None else self.markov_before.rows(before, hidden.dtype)
        if self.markov_after is not None and known is not None:
            logits = logits + split_last(self.markov_after.scores(known))
        if self.selector is not None:
            logits = self.selector(keep_whole(logits), hidden, before)
        if self.confidence is None:
            return logits, None
        read = jnp.concatenate([hidden, known], axis=-1) if config.estimates_by_token and known is not None else hidden
        return logits, jax.nn.sigmoid(self.confidence(read, out_dtype=jnp.float32)[:, 0])
