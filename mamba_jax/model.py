"""The model of every family: an embedding, a flat list of residual sublayers, a norm and a head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.linear import linear
from mamba_jax.config import HAS_ATTENTION, HAS_MAMBA, MLP, SHARED, HybridConfig
from mamba_jax.layout import Layout, SequenceLayout
from mamba_jax.modules.basic import RMSNorm, Weight, normal, scaled
from mamba_jax.modules.blocks import Block
from mamba_jax.modules.mtp import MTP
from mamba_jax.modules.shared import SharedBlock, SharedUse
from mamba_jax.sharding.axis import same_everywhere, split_last
from mamba_jax.store import MambaSlots, Store


class HybridModel(nnx.Module):
    """A hybrid Mamba2/attention language model.

    `model(tokens, lengths)` scores whole sequences and can be differentiated. Serving calls `hidden` with a layout and
    a store instead; both run the same modules.
    """

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        """Random weights of the given dtype (routers and what steers the recurrences are always float32)."""
        self.config = config
        self.embed = Weight(normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.blocks = nnx.List(
            [
                SharedUse(config, rngs=rngs, dtype=dtype)
                if kind == SHARED
                else Block(kind, config, mlp_index=config.pattern[:i].count(MLP), rngs=rngs, dtype=dtype)
                for i, kind in enumerate(config.pattern)
            ]
        )
        count = config.shared.num_blocks if config.shared else 0
        self.shared = nnx.List([SharedBlock(config, rngs=rngs, dtype=dtype) for _ in range(count)])
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Weight(normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.mtp = MTP(config, rngs=rngs, dtype=dtype) if config.mtp_pattern else None

    def __call__(
        self, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"] | None = None
    ) -> Float[Array, "batch length vocab"]:
        """Logits (float32) for the token after each token.

        Args:
            tokens: sequences, each followed by padding of any value.
            lengths: how many tokens of each sequence count; all if None. Logits of padding mean nothing.
        """
        batch, length = tokens.shape
        hidden, _ = self.hidden(tokens.reshape(-1), SequenceLayout.of(batch, length, lengths), None)
        return self.logits(hidden).reshape(batch, length, -1)

    def embedded(self, tokens: Int[Array, " T"]) -> Float[Array, "T hidden"]:
        """The embeddings of tokens, as the first sublayer sees them."""
        return self._embedded(self.embed, tokens)

    def draft_embedded(self, tokens: Int[Array, " T"]) -> Float[Array, "T hidden"]:
        """The embeddings of tokens, as the multi-token-prediction layer sees them."""
        own = None if self.mtp is None else self.mtp.embed
        return self._embedded(self.embed if own is None else own, tokens)

    def _embedded(self, table: Weight, tokens: Int[Array, " T"]) -> Float[Array, "T hidden"]:
        rows = same_everywhere(jnp.take(table.weight[...], tokens, axis=0, mode="clip"))
        return scaled(rows, self.config.embedding_multiplier)

    @overload
    def hidden(self, tokens: Array, layout: Layout, store: Store) -> tuple[Array, Store]: ...
    @overload
    def hidden(self, tokens: Array, layout: Layout, store: None) -> tuple[Array, None]: ...
    def hidden(
        self, tokens: Int[Array, " T"], layout: Layout, store: Store | None
    ) -> tuple[Float[Array, "T hidden"], Store | None]:
        """Runs the sublayers over packed tokens.

        Args:
            tokens: as the layout arranges them.
            store: the recurrent states, keys and values to read and to update; None for whole sequences.
        Returns:
            hidden states after the final norm, and the store.
        """
        embedded = self.embedded(tokens)
        x = embedded.astype(jnp.float32) if self.config.residual_in_fp32 else embedded
        pieces = _Pieces(store)
        uses = 0
        for kind, block in zip(self.config.pattern, self.blocks, strict=True):
            state = pieces.take(kind)
            if isinstance(block, SharedUse):
                shared = self.shared[uses % len(self.shared)]
                x, state = block(x, layout, state, block=shared, embedded=embedded)
                uses += 1
            else:
                x, state = block(x, layout, state)
            pieces.put(kind, state)
        return self.final_norm(x), pieces.store()

    @overload
    def draft(self, tokens: Array, hidden: Array, layout: Layout, store: Store) -> tuple[Array, Store]: ...
    @overload
    def draft(self, tokens: Array, hidden: Array, layout: Layout, store: None) -> tuple[Array, None]: ...
    def draft(
        self,
        tokens: Int[Array, " T"],
        hidden: Float[Array, "T hidden"],
        layout: Layout,
        store: Store | None,
    ) -> tuple[Float[Array, "T hidden"], Store | None]:
        """Runs the multi-token-prediction layer over the layout's tokens; see `MTP`.

        Args:
            hidden: for each token, the hidden state (after the final norm) of the token before it.
        Returns:
            hidden states whose `draft_logits` predict the token after each token, and the store.
        Raises:
            ValueError: the model has no such layer.
        """
        if self.mtp is None:
            raise ValueError(f"this {self.config.family} model has no multi-token-prediction layer")
        main = self.config.num_attention_uses
        own = None if store is None else store.kv[main:]
        out, kv = self.mtp(self.draft_embedded(tokens), hidden, layout, own)
        if store is not None and kv is not None:
            store = dataclasses.replace(store, kv=store.kv[:main] + kv)
        return out, store

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Logits (float32) from hidden states after the final norm."""
        return self._logits(self.head, hidden)

    def draft_logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Logits (float32) from what `draft` gives."""
        return self._logits(self.draft_head, hidden)

    @property
    def head(self) -> Weight:
        """[vocab, hidden]: the table that hidden states are compared with."""
        return self.embed if self.lm_head is None else self.lm_head

    @property
    def draft_head(self) -> Weight:
        """That of the multi-token-prediction layer: the model's, unless it has its own."""
        own = None if self.mtp is None else self.mtp.lm_head
        return self.head if own is None else own

    def _logits(self, head: Weight, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        # Said of the product first: left to itself, the compiler collects the whole head on every device.
        logits = same_everywhere(split_last(linear(hidden, head.weight[...], out_dtype=jnp.float32)))
        return scaled(logits, self.config.logits_multiplier)

    @classmethod
    def abstract(cls, config: HybridConfig, *, dtype: DTypeLike = jnp.float32) -> HybridModel:
        """The model with shapes and dtypes in place of weights; costs no memory."""
        return nnx.eval_shape(lambda: cls(config, rngs=cast(nnx.Rngs, _SameKey()), dtype=dtype))

    @classmethod
    def from_parameters(cls, config: HybridConfig, values: Mapping[str, Array]) -> HybridModel:
        """The model with these weights, by their dotted paths as in `parameters`; dtypes are taken as they come.

        Raises:
            ValueError: paths that are missing or unknown, or a wrong shape.
        """
        graph, state = nnx.split(cls.abstract(config))
        leaves = {".".join(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
        if leaves.keys() != values.keys():
            raise ValueError(
                f"missing weights {sorted(leaves.keys() - values.keys())}, "
                f"unknown weights {sorted(values.keys() - leaves.keys())}"
            )
        for name, (_, leaf) in leaves.items():
            if leaf.shape != values[name].shape:
                raise ValueError(f"{name} has shape {values[name].shape}, expected {leaf.shape}")
        filled = [(path, leaf.replace(values[name])) for name, (path, leaf) in leaves.items()]
        return nnx.merge(graph, nnx.from_flat_state(filled))

    @property
    def num_parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))


class _SameKey:
    """Stands in for `nnx.Rngs` where values do not matter: its counter makes tracing time quadratic in the model."""

    def params(self) -> Array:
        return jax.random.key(0)


def parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Every parameter under its dotted path, for example `blocks.3.mixer.out_proj.weight`."""
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


class _Pieces:
    """Hands each sublayer its piece of the store, in model order, and collects what comes back."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._mamba: list[MambaSlots] = []
        self._kv: list[Array] = []

    def take(self, kind: str) -> Any:
        """A sublayer's state: Mamba's slots, keys and values, the pair of them, or None."""
        mamba = self._store.mamba[len(self._mamba)] if self._store and kind in HAS_MAMBA else None
        kv = self._store.kv[len(self._kv)] if self._store and kind in HAS_ATTENTION else None
        if kind in HAS_MAMBA and kind in HAS_ATTENTION:
            return mamba, kv
        return kv if mamba is None else mamba

    def put(self, kind: str, state: Any) -> None:
        """What became of the state that the sublayer took."""
        if kind in HAS_MAMBA and kind in HAS_ATTENTION:
            mamba, kv = state
        else:
            mamba = kv = state
        if kind in HAS_MAMBA:
            self._mamba.append(mamba)
        if kind in HAS_ATTENTION:
            self._kv.append(kv)

    def store(self) -> Store | None:
        """The store as the sublayers have left it; keys and values of the draft layers are as they were."""
        if self._store is None:
            return None
        rest = self._store.kv[len(self._kv) :]
        return dataclasses.replace(self._store, mamba=tuple(self._mamba), kv=(*self._kv, *rest))
