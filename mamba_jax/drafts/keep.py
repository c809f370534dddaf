"""No drafts, but all that another worker needs for making them."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from mamba_jax.drafts.base import DraftModel, StepFacts
from mamba_jax.drafts.mtp import MTPDrafts
from mamba_jax.store import Store


@dataclass(frozen=True)
class MTPCache(MTPDrafts):
    """Runs the model's draft layer over all tokens, so that its keys and values are in the pages, and proposes nothing.

    For a worker that only prefills (K = 0): the one that goes on from its pages may draft.
    """

    def propose(
        self, model: DraftModel, store: Store, state: None, facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows 0"], Store, None]:
        _, store, _ = super().propose(model, store, state, facts, 1)
        return jnp.zeros((facts.row_id.shape[0], 0), jnp.int32), store, None
