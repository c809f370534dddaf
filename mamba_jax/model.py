"""The model of every family: an embedding, a flat list of residual sublayers, a norm and a head."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import MOE, SHARED, HybridConfig, StateUnit, need
from mamba_jax.config.drafter import BlockConfig, DrafterConfig, EagleConfig
from mamba_jax.layout import BlockLayout, Hidden, Layout, SequenceLayout, has_tails
from mamba_jax.layout.member import Member
from mamba_jax.modules.basic import OwnTables, Table, normal, scaled, shapes_only
from mamba_jax.modules.blocks import Block, model_norm
from mamba_jax.modules.drafter import MTP, BlockDrafter, Eagle
from mamba_jax.modules.quantized import quantize_in_place, quantized_weights, weight_of
from mamba_jax.modules.shared import SharedBlock, SharedUse
from mamba_jax.sequences import check_packed, checked_sequences
from mamba_jax.sharding.across import on_members
from mamba_jax.sharding.axis import keep_whole, split_last
from mamba_jax.store import EXPERT, EXPERTS, Store, StoreShape

MaybeStore = TypeVar("MaybeStore", Store, None)
DRAFTERS: Mapping[type[DrafterConfig], Callable[..., nnx.Module]] = {EagleConfig: Eagle, BlockConfig: BlockDrafter}
"""The module of each drafter's configuration. It takes (config, target's config, rngs, dtype)."""


class HybridModel(nnx.Module):
    """A hybrid Mamba2/attention language model.

    `model(tokens, lengths)` scores whole sequences and can be differentiated. Serving calls `run` with a layout and a
    store instead; both run the same modules.
    """

    source: str | None = None
    """The reference that `mamba_jax.load` read the model from."""
    own_embed: OwnTables | None = None
    own_lm_head: OwnTables | None = None
    """What adapters have instead of the embedding and of the head; see `mamba_jax.adapters`."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32) -> None:
        """Returns random weights of the given dtype. Routers and parameters of recurrences are always float32."""
        self.config = config
        self.embed = Table(normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        made: Any = {"rngs": rngs, "dtype": dtype}
        blocks = enumerate(config.pattern)
        self.blocks = nnx.List(
            [SharedUse(config, **made) if kind == SHARED else Block(config, i, **made) for i, kind in blocks]
        )
        count = config.shared.num_blocks if config.shared else 0
        self.shared = nnx.List([SharedBlock(config, **made) for _ in range(count)])
        self.final_norm = model_norm(config, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Table(normal(rngs, (config.vocab_size, config.hidden_size), dtype))
        self.mtp = MTP(config, **made) if config.mtp_pattern else None
        drafter = config.drafter
        self.drafter: Any = None if drafter is None else DRAFTERS[type(drafter)](drafter, config, **made)

    def __call__(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "batch length vocab"]:
        """Returns logits (float32) for the token after each token. Arguments and errors are those of `hidden`."""
        return self.logits(self.hidden(tokens, lengths))

    def hidden(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "batch length hidden"]:
        """Returns the hidden state of each token after the final norm, from which `logits` predicts the next token.

        Args:
            tokens: integers [batch, length], each sequence followed by padding of any value.
            lengths: integers [batch], the number of tokens of each sequence without padding; all if None. Results for
                padding are undefined.
        Raises:
            TypeError: tokens or lengths are not arrays of integers.
            ValueError: their shapes are wrong, a length is not between 0 and the sequences' length, or a token is not
                in the vocabulary. Within `jax.jit`, values are unknown: tokens outside of the vocabulary are clipped.
        """
        tokens, lengths = checked_sequences(self.config, tokens, lengths)
        batch, length = tokens.shape
        flat, _ = self.run(tokens.reshape(-1), SequenceLayout.of(batch, length, lengths), None)
        return flat[:, : self.config.hidden_size].reshape(batch, length, self.config.hidden_size)

    def embedded(self, tokens: Int[Array, " T"], adapter: Int[Array, " T"] | None = None) -> Hidden:
        """Returns the embeddings of tokens, as the first sublayer sees them. `adapter`: as in `Layout`."""
        rows = self._rows(self.embed, tokens)
        if self.own_embed is not None:
            rows = self.own_embed.replace(rows, adapter, lambda table: self._rows(table, tokens))
        return scaled(rows, self.config.embedding_multiplier)

    def draft_embedded(self, tokens: Int[Array, " T"]) -> Hidden:
        """Returns the embeddings of tokens, as the draft layer sees them."""
        own, config = getattr(self.draft_layer, "embed", None), self.config.drafter or self.config
        return scaled(self._rows(self.embed if own is None else own, tokens), config.embedding_multiplier)

    def _rows(self, table: Table, tokens: Int[Array, " T"]) -> Hidden:
        return keep_whole(table.rows(tokens, self.dtype))

    def run(
        self, tokens: Int[Array, " T"], layout: Layout, store: MaybeStore, *, rematerialize: bool = False
    ) -> tuple[Hidden, MaybeStore]:
        """Runs the sublayers over packed tokens.

        Args:
            tokens: as the layout arranges them.
            store: the recurrent states, keys and values to read and to update; None for whole sequences.
            rematerialize: a gradient keeps only each sublayer's inputs and recomputes the rest of the sublayer.
        Returns:
            hidden states after the final norm, followed by what the drafter reads if the model has one
            (`HybridConfig.step_size`); and the store.
        Raises:
            ValueError: a token that is no padding is not in the vocabulary; within `jax.jit`, it is clipped.
        """
        check_packed(self.config, tokens, layout)
        if not tokens.shape[0]:
            return jnp.zeros((0, self.config.step_size), self.dtype), store
        embedded = self.embedded(tokens, layout.adapter)
        x = embedded.astype(jnp.float32) if self.config.residual_in_fp32 else embedded
        given, uses = _pieces(self.config, store, layout), 0
        passed: list[Array] = []
        pieces: list[Any] = []
        for index, (block, piece) in enumerate(zip(self.blocks, given, strict=True)):
            own = layout.of_block(index) if isinstance(layout, SequenceLayout) else layout
            run: Any = functools.partial(block, layout=own)
            if isinstance(block, SharedUse):
                shared = self.shared[uses % len(self.shared)]
                run = functools.partial(run, block=shared, embedded=embedded)
                uses += 1
            if rematerialize:
                run = jax.checkpoint(run)
            passed.append(x)
            x, piece = run(x, state=piece)
            pieces.append(piece)
        hidden = self.final_norm(x)
        if self.drafter is not None:
            passed.append(x)
            read = self.drafter.features([passed[place] for place in self.drafter.places])
            hidden = jnp.concatenate([hidden, keep_whole(read)], axis=-1)
        new = None if store is None else _with_pieces(self.config, store, layout, pieces)
        return hidden, cast(Any, new)

    def draft(
        self, tokens: Int[Array, " T"], hidden: Hidden, layout: Layout, store: MaybeStore
    ) -> tuple[Hidden, MaybeStore]:
        """Runs the draft layer over the layout's tokens; see `MTP` and `Eagle`.

        Args:
            hidden: for each token, the hidden state of the token before it: `draft_input` of the model's, or what this
                function returned for that token.
        Returns:
            hidden states whose `draft_logits` predict the token after each token, and the store.
        Raises:
            ValueError: the model has no draft layer, or as `run`.
        """
        check_packed(self.config, tokens, layout)
        layer = self.draft_layer
        if layer is None:
            raise ValueError(f"this {self.config.family} model has no multi-token-prediction layer and no drafter")
        main = self.config.num_attention_uses
        own = None if store is None else store.kv[main:]
        out, kv = layer(self.draft_embedded(tokens), hidden, layout, own)
        if store is not None and kv is not None:
            store = dataclasses.replace(store, kv=store.kv[:main] + kv)
        return out, store

    def draft_block(self, tokens: Int[Array, " T"], layout: BlockLayout, store: Store) -> tuple[Hidden, Store]:
        """Runs the drafter over a block of tokens at once; see `BlockDrafter`. Returns what `draft_logits` takes."""
        main = self.config.num_attention_uses
        out, kv = self.draft_layer(self.draft_embedded(tokens), layout, store.kv[main:])
        return out, dataclasses.replace(store, kv=store.kv[:main] + kv)

    def remember_for_drafts(self, hidden: Hidden, layout: Layout, store: Store) -> Store:
        """Returns the store with the drafter's keys and values of a layout's tokens, from their hidden states."""
        main = self.config.num_attention_uses
        kv = self.draft_layer.remember(self.draft_input(hidden), layout, store.kv[main:])
        return dataclasses.replace(store, kv=store.kv[:main] + kv)

    def logits(
        self, hidden: Float[Array, "*batch hidden"], adapter: Int[Array, "*batch"] | None = None
    ) -> Float[Array, "*batch vocab"]:
        """Returns logits (float32) from hidden states after the final norm. `adapter`: as in `Layout`."""
        return keep_whole(self.divided_logits(hidden, adapter))

    def divided_logits(
        self, hidden: Float[Array, "*batch hidden"], adapter: Int[Array, "*batch"] | None = None
    ) -> Float[Array, "*batch vocab"]:
        """Returns the logits as the product leaves them: each device has its part of the vocabulary."""
        hidden = hidden[..., : self.config.hidden_size]
        scores = split_last(self.head.scores(hidden))
        if self.own_lm_head is not None:
            scores = self.own_lm_head.replace(scores, adapter, lambda table: split_last(table.scores(hidden)))
        return self._scaled_logits(scores)

    @property
    def draft_layer(self) -> Any:
        """The layer or the drafter that drafts from the model's hidden states; None without one."""
        return self.mtp if self.drafter is None else self.drafter

    def draft_input(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch inputs"]:
        """Returns what `draft` reads of the model's hidden states."""
        return hidden if self.drafter is None else hidden[..., self.config.hidden_size :]

    def draft_logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Returns logits (float32) from the output of `draft`, divided over devices in the same way.

        A drafter's are over the draft vocabulary; `draft_tokens` maps it.
        """
        if self.drafter is None:
            return self._scaled_logits(split_last(self.draft_head.scores(hidden)))
        return split_last(self.draft_head.scores(self.drafter.final_norm(hidden)))

    def draft_tokens(self, index: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """Returns the model's tokens for indices of `draft_logits`."""
        tokens = None if self.drafter is None else self.drafter.tokens
        return index if tokens is None else tokens[...][index]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations, which norms return. Weights may be narrower."""
        return self.final_norm.weight.get_value().dtype

    @property
    def head(self) -> Table:
        """The table [vocab, hidden] of the output head."""
        return self.embed if self.lm_head is None else self.lm_head

    @property
    def draft_head(self) -> Table:
        """The head of the draft layer: the model's, unless the layer has its own."""
        own: Table | None = getattr(self.draft_layer, "lm_head", None)
        return self.head if own is None else own

    def _scaled_logits(self, scores: Float[Array, "*batch vocab"]) -> Float[Array, "*batch vocab"]:
        # The product's sharding is constrained before this, or XLA all-gathers the head on every device.
        logits, cap = scaled(scores, self.config.logits_multiplier), self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    @classmethod
    def abstract(cls, config: HybridConfig, *, dtype: DTypeLike = jnp.float32) -> HybridModel:
        """Returns the model with shapes and dtypes in place of weights; costs no memory."""
        return nnx.merge(*_described(cls, config, repr(config), jnp.dtype(dtype)), copy=True)

    @classmethod
    def from_parameters(cls, config: HybridConfig, values: Mapping[str, Array]) -> HybridModel:
        """Returns the model with these weights, by dotted paths as in `parameters`. Keeps the dtypes of the values.

        A weight is quantized if the paths are those of the parts of a quantized weight (`QuantizedParam`).

        Raises:
            ValueError: paths are missing or unknown, a shape is wrong, or a weight cannot be quantized.
        """
        model = cls.abstract(config)
        quantize_in_place(model, quantized_weights(values))
        graph, state = nnx.split(model)
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
        """How many numbers the weights are; scales of quantized ones do not count."""
        return num_parameters(parameters(self))


@functools.lru_cache(maxsize=64)
def _described(
    kind: type[HybridModel], config: HybridConfig, written: str, dtype: jnp.dtype
) -> tuple[nnx.GraphDef[HybridModel], nnx.State]:
    """Returns the structure of `HybridModel.abstract`, which takes ten times as long to make as to copy.

    `written`: the configuration's repr, in which 1 and 1.0 differ: digests of weights contain it.
    """
    with shapes_only():
        return nnx.split(kind(config, rngs=nnx.Rngs(0), dtype=dtype))


def num_parameters(leaves: Mapping[str, Any]) -> int:
    """Returns how many numbers these parameters are, given by dotted path; scales of quantized ones do not count."""
    return sum(
        math.prod(leaf.shape) for path, leaf in leaves.items() if (weight_of(path) is None) or path.endswith(".values")
    )


def parameters(model: nnx.Module) -> dict[str, nnx.Param]:
    """Returns every parameter under its dotted path, for example `blocks.3.mixer.out_proj.weight`."""
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def _units(config: HybridConfig, kind: str) -> list[StateUnit]:
    """Returns where such a sublayer keeps something: in slots, in pages, in both, or nowhere."""
    return [unit for unit in (StateUnit.SLOT, StateUnit.TOKEN) if config.state(kind, unit)]


def _pieces(config: HybridConfig, store: Store | None, layout: Any) -> Iterator[Any]:
    """Yields each sublayer's part of the store, in model order: of the slots, its keys and values, the pair, or None.

    If the layout has tails, each array in slots is a pair (array, tails of its inputs by name). The state of experts,
    if the store records them, is an array for their numbers.
    """
    slots, kv = (itertools.repeat(None), itertools.repeat(None)) if store is None else (store.slots, store.kv)
    parts: dict[StateUnit, Iterator[Any]] = {StateUnit.SLOT: iter(slots), StateUnit.TOKEN: iter(kv)}
    if store is not None and store.tails is not None and has_tails(layout):
        every = zip(store.slots, store.tails.layers, StoreShape.of(config).tails, strict=True)
        parts[StateUnit.SLOT] = (
            {
                name: (array, {tail.name: rings[tail.name] for tail in declared if tail.of == name})
                for name, array in arrays.items()
            }
            for arrays, rings, declared in every
        )
    for kind in config.pattern:
        if kind == MOE and store is not None and store.experts is not None:
            yield {EXPERTS: jnp.zeros((layout.valid.shape[0], need(config.moe).experts_per_token), EXPERT)}
        else:
            own = [next(parts[unit]) for unit in _units(config, kind)]
            yield tuple(own) if len(own) > 1 else next(iter(own), None)


def _with_pieces(config: HybridConfig, store: Store, layout: Any, pieces: list[Any]) -> Store:
    """Returns the store with the sublayers' updated parts; keys and values of the draft layers are unchanged."""
    found: dict[StateUnit, list[Any]] = {StateUnit.SLOT: [], StateUnit.TOKEN: []}
    for kind, piece in zip(config.pattern, pieces, strict=True):
        units = _units(config, kind)
        for unit, part in zip(units, piece if len(units) > 1 else [piece] * len(units), strict=True):
            found[unit].append(part)
    slots, kv, tails, experts = found[StateUnit.SLOT], found[StateUnit.TOKEN], store.tails, store.experts
    if tails is not None and has_tails(layout):
        pairs = [each.values() for each in slots]
        rings = tuple({name: ring for _, own in each for name, ring in own.items()} for each in pairs)
        tails = dataclasses.replace(tails, layers=rings)
        slots = [{name: array for name, (array, _) in each.items()} for each in slots]
    if experts is not None:
        chosen = [piece[EXPERTS] for kind, piece in zip(config.pattern, pieces, strict=True) if kind == MOE]
        (experts,) = on_members(_record, (experts,), layout, jnp.concatenate(chosen, axis=1)[:, None])
    kv = [*kv, *store.kv[len(kv) :]]
    return dataclasses.replace(store, slots=tuple(slots), kv=tuple(kv), tails=tails, experts=experts)


def _record(member: Member | None, pages: tuple[Array, ...], layout: Any, values: Array) -> tuple[Array, ...]:
    here = layout if member is None else layout.on_member(member)
    return tuple(here.record(values, each) for each in pages)
