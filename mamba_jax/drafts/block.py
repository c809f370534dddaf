"""Drafts of a whole block in one pass, by a drafter such as that of DFlash or DSpark (`BlockConfig`)."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from mamba_jax.drafts.base import LayerDrafts, StepFacts
from mamba_jax.layout.decode import BlockLayout
from mamba_jax.model import HybridModel
from mamba_jax.sampling import largest
from mamba_jax.store import Store


@dataclass(frozen=True)
class BlockDrafts(LayerDrafts):
    """Makes keys and values of all tokens that a step has kept, then drafts the tokens after the newest one.

    The block's own keys and values are stored after the row's tokens. Later tokens overwrite them before they are read,
    as they do those of rejected drafts.
    """

    mask_token: int
    from_newest: bool
    """As in `BlockConfig`."""

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
        drafts = [jnp.maximum(facts.newest, 0)]
        for i in range(count):
            following = model.draft_following(drafts[-1])
            drafts.append(model.draft_tokens(largest(logits[:, i] + following)[0]))
        return jnp.where(facts.sampled[:, None], jnp.stack(drafts[1:], axis=1), -1), store, None
