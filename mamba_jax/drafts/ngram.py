"""Prompt lookup (Saxena, 2023): drafts are the tokens that followed an earlier occurrence of the last tokens."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mamba_jax.drafts.base import DraftSource, StepFacts
from mamba_jax.model import HybridModel
from mamba_jax.store import Store


@dataclass(frozen=True)
class NGramDrafts(DraftSource):
    """Looks the sequence's last `max_n` tokens up in the sequence itself, then fewer, but at least `min_n`.

    The device has a copy of each seat's tokens, so drafting does not wait for the host.
    """

    sees_tokens: ClassVar[bool] = True
    stores_kv: ClassVar[bool] = False
    min_n: int
    max_n: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"n-grams of {self.min_n} to {self.max_n} tokens: expected 1 <= min_n <= max_n")

    def init(self, *, seats: int, max_len: int) -> Int[Array, "seats max_len"]:
        return jnp.full((seats, max_len), -1, jnp.int32)

    def seat(
        self, state: Int[Array, "seats max_len"], row_id: Int[Array, ""], tokens: Int[Array, " max_len"] | None
    ) -> Int[Array, "seats max_len"]:
        if tokens is None:
            raise ValueError("the tokens of a request must be known for drafts by n-grams")
        return state.at[row_id].set(tokens)

    def propose(
        self, model: HybridModel, store: Store, state: Int[Array, "seats max_len"], facts: StepFacts, count: int
    ) -> tuple[Int[Array, "rows count"], Store, Int[Array, "seats max_len"]]:
        at = facts.emitted_from[:, None] + jnp.arange(facts.emitted.shape[1])
        # Indices outside of the array are dropped. Padding rows emit nothing.
        at = jnp.where(facts.emitted >= 0, at, state.shape[1])
        state = state.at[facts.row_id[:, None], at].set(facts.emitted, mode="drop")
        drafts = look_up(
            state[facts.row_id], facts.length + facts.kept + 1, count=count, min_n=self.min_n, max_n=self.max_n
        )
        return jnp.where(facts.sampled[:, None], drafts, -1), store, state


def look_up(
    tokens: Int[Array, "rows max_len"], length: Int[Array, " rows"], *, count: int, min_n: int, max_n: int
) -> Int[Array, "rows count"]:
    """Returns the tokens after the latest of the longest earlier occurrences of each row's last tokens.

    An occurrence may overlap the last tokens; the sequence is then assumed to continue with the same period.

    Args:
        tokens: sequences, padded.
        length: number of tokens of each sequence without padding.
        count: tokens to return for each row; all are -1 if the last `min_n` tokens did not occur before.
    """
    size = tokens.shape[1]
    place = jnp.arange(size)
    last = length[:, None] - 1

    def longer(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """Selects, from the occurrences of i equal tokens that end at each position, those with i + 1 equal tokens."""
        equal, matched = found
        wanted = jnp.take_along_axis(tokens, jnp.clip(last - i, 0, size - 1), axis=1)
        equal &= (jnp.roll(tokens, i, axis=1) == wanted) & (place >= i) & (last >= i)
        return equal, matched + equal

    start = (place < last, jnp.zeros(tokens.shape, jnp.int32))
    _, matched = jax.lax.fori_loop(0, max_n, longer, start)
    # The longest first, then the latest.
    longest = matched.max(axis=1, keepdims=True)
    end = jnp.where(matched == longest, place, -1).max(axis=1, keepdims=True)
    period = jnp.maximum(last - end, 1)
    index = end + 1 + jnp.arange(count) % period
    following = jnp.take_along_axis(tokens, jnp.clip(index, 0, size - 1), axis=1)
    return jnp.where(longest >= min_n, following, -1)
