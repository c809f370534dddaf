"""Drafts of a layer: one after the other, by the model's own multi-token-prediction layer (Gloeckle et al., 2024;
DeepSeek-V3, section 2.2) or by the drafter of EAGLE-3; or a whole block at once, by that of DFlash or DSpark.

The layer reads pairs: a token, and the hidden state of the token before it. Its keys and values lie in the row's pages
under the index of the pair's token, so that a page depends only on its own tokens, and a prefix hit loses nothing.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mamba_jax.drafts.base import DraftSource, StepFacts
from mamba_jax.layout.decode import BlockLayout, DecodeLayout
from mamba_jax.model import HybridModel
from mamba_jax.sampling import largest
from mamba_jax.store import Store


@dataclass(frozen=True)
class MTPDrafts(DraftSource):
    """Runs the layer over all tokens that a step has kept, then over its own drafts, one after the other.

    Drafts' keys and values are stored after the row's tokens. Later tokens overwrite them before they are read.
    """

    def propose(
        self, model: HybridModel, store: Store, state: None, facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows count"], Store, None]:
        facts = replace(facts, hidden=model.draft_input(facts.hidden), before=model.draft_input(facts.before))
        hidden, store = (
            _after_decode(model, store, facts)
            if isinstance(facts.layout, DecodeLayout)
            else _after_prefill(model, store, facts)
        )
        position = facts.length + facts.kept
        drafts = [_best(model, hidden)]
        for step in range(1, count):
            hidden, store = model.draft(drafts[-1], hidden, _single(facts, position + step), store)
            drafts.append(_best(model, hidden))
        return jnp.where(facts.sampled[:, None], jnp.stack(drafts, axis=1), -1), store, None


@dataclass(frozen=True)
class MTPCache(MTPDrafts):
    """Runs the model's draft layer over all tokens, so that its keys and values are in the pages, and proposes nothing.

    For a worker that only prefills (K = 0): the one that goes on from its pages may draft.
    """

    def propose(
        self, model: HybridModel, store: Store, state: None, facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows 0"], Store, None]:
        _, store, _ = super().propose(model, store, state, facts, 1)
        return jnp.zeros((facts.row_id.shape[0], 0), jnp.int32), store, None


def _best(model: HybridModel, hidden: Float[Array, "rows hidden"]) -> Int[Array, " rows"]:
    return model.draft_tokens(largest(model.draft_logits(hidden))[0])


def _after_decode(model: HybridModel, store: Store, facts: StepFacts) -> tuple[Float[Array, "rows hidden"], Store]:
    """Runs the layer over the pairs of all kept tokens and the newest one at once; returns its output at the newest."""
    rows = facts.row_id.shape[0]
    width = facts.tokens.shape[0] // rows + 1
    step = jnp.arange(width)
    tokens = jnp.pad(facts.tokens.reshape(rows, -1), ((0, 0), (0, 1)))
    tokens = jnp.where(step == facts.kept[:, None], facts.newest[:, None], tokens)
    hidden = facts.hidden.reshape(rows, width - 1, -1)
    previous = jnp.concatenate([facts.before[:, None].astype(hidden.dtype), hidden], axis=1)
    num_tokens = facts.kept + facts.sampled
    layout = DecodeLayout.in_pages(length=facts.length, num_tokens=num_tokens, page_table=facts.page_table, steps=width)
    out, store = model.draft(jnp.maximum(tokens, 0).reshape(-1), previous.reshape(rows * width, -1), layout, store)
    newest = jnp.arange(rows) * width + jnp.minimum(facts.kept, width - 1)
    return out[newest], store


def _after_prefill(model: HybridModel, store: Store, facts: StepFacts) -> tuple[Float[Array, "rows hidden"], Store]:
    """Runs the layer over the pairs of all tokens, then over those of the newest ones."""
    layout = facts.layout
    assert not isinstance(layout, DecodeLayout)
    first = jnp.arange(facts.tokens.shape[0]) == layout.packed.row_start[layout.packed.token_row]
    before = facts.before[layout.packed.token_row].astype(facts.hidden.dtype)
    previous = jnp.where(first[:, None], before, jnp.roll(facts.hidden, 1, axis=0))
    _, store = model.draft(facts.tokens, previous, layout, store)
    last = facts.hidden[jnp.maximum(layout.packed.row_start + facts.kept - 1, 0)]
    return model.draft(facts.newest, last, _single(facts, facts.length + facts.kept), store)


def _single(facts: StepFacts, position: Int[Array, " rows"]) -> DecodeLayout:
    """Lays out one token of each row that has sampled, at these positions. Drops tokens past the page table's end."""
    num_tokens = facts.sampled.astype(jnp.int32)
    return DecodeLayout.in_pages(length=position, num_tokens=num_tokens, page_table=facts.page_table, steps=1)


@dataclass(frozen=True)
class BlockDrafts(DraftSource):
    """Makes keys and values of all tokens that a step has kept, then drafts the tokens after the newest one.

    The block's own keys and values are stored after the row's tokens. Later tokens overwrite them before they are read,
    as they do those of rejected drafts.
    """

    mask_token: int
    from_newest: bool
    """As in `BlockConfig`."""
    least_chance: float = 0.0
    """A row's drafts end before the first one for which the drafter estimates a lower chance that it and all before it
    are right."""

    def propose(
        self, model: HybridModel, store: Store, state: None, facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows count"], Store, None]:
        store = model.remember_for_drafts(facts.hidden, facts.layout, store)
        rows, width = facts.row_id.shape[0], count + (not self.from_newest)
        num_tokens, length = jnp.where(facts.sampled, width, 0), facts.length + facts.kept
        layout = BlockLayout.in_pages(length=length, num_tokens=num_tokens, page_table=facts.page_table, steps=width)
        tokens = jnp.full((rows, width), self.mask_token).at[:, 0].set(jnp.maximum(facts.newest, 0))
        out, store = model.draft_block(tokens.reshape(-1), layout, store)
        last = out.reshape(rows, width, -1)[:, -count:]
        logits = model.draft_logits(last.reshape(rows * count, -1)).reshape(rows, count, -1)
        before, chance, drafts = jnp.maximum(facts.newest, 0), jnp.ones(rows), []
        for i in range(count):
            scores, right = model.draft_layer.following(logits[:, i], last[:, i], before)
            before = model.draft_tokens(largest(scores)[0])
            chance = chance if right is None else chance * right
            drafts.append(jnp.where(facts.sampled & (chance >= self.least_chance), before, -1))
        return jnp.stack(drafts, axis=1), store, None
