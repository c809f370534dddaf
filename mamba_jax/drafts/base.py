"""The interface of draft sources.

A source runs inside the decode and prefill programs, after sampling, so that the next step can be dispatched before the
host has seen anything of this one. Whatever it proposes, no output depends on it: drafts are verified by the next step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.layout.decode import DecodeLayout
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.model import HybridModel
from mamba_jax.store import Store


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepFacts:
    """The tokens that a step has fed, kept and sampled. Padding rows have seat 0, and no tokens."""

    layout: DecodeLayout | PrefillLayout
    """Of the tokens that were fed, rejected drafts included."""
    tokens: Int[Array, " T"]
    hidden: Float[Array, "T hidden"]
    """After the final norm; see `HybridModel.run`."""
    before: Float[Array, "rows hidden"]
    """The hidden state of the token before each row's first one; zeros without one."""
    row_id: Int[Array, " rows"]
    length: Int[Array, " rows"]
    """Tokens committed before the step."""
    kept: Int[Array, " rows"]
    """Of the tokens fed."""
    emitted: Int[Array, "rows H"]
    """-1 = none. The first is token number `emitted_from` of its sequence, counted from 0."""
    emitted_from: Int[Array, " rows"]
    sampled: Bool[Array, " rows"]
    """Rows that have emitted something; only they get drafts."""
    newest: Int[Array, " rows"]
    """The token sampled last, number `length + kept` of its sequence; anything where nothing was sampled."""
    page_table: Int[Array, "rows pages"]


class DraftSource:
    """Makes drafts. It has settings only and is hashable; its state of each seat is in `Rows.source`.

    By default it has no such state, as sources that draft by the model's draft layer or drafter.
    """

    sees_tokens: ClassVar[bool] = False
    """Whether a request that takes a seat must bring its tokens along."""
    stores_kv: ClassVar[bool] = True
    """Whether it keeps keys and values of the model's draft layer, those of drafts included, in the row's pages."""

    def init(self, *, seats: int, max_len: int) -> Any:
        """Returns the source's state of each seat: a pytree of arrays [seats, ...], or None."""
        return None

    def seat(self, state: Any, row_id: Int[Array, ""], tokens: Int[Array, " max_len"] | None) -> Any:
        """Returns the state after a request takes a seat. `tokens` is its sequence so far, followed by -1; None unless
        `sees_tokens`."""
        return state

    def propose(
        self, model: HybridModel, store: Store, state: Any, facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows count"], Store, Any]:
        """Returns `count` drafts after each row's newest token (-1 after the last draft), the store and the state."""
        raise NotImplementedError
