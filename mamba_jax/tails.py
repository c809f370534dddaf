"""Tails: the inputs of a running row's last tokens, kept on the device in addition to its anchor under replay.

A row that has absorbed c tokens has a slot with S(a), a <= c, and a tail with the inputs of tokens a .. c-1; its next
step computes what it needs of S(c) from both. Each seat has a tail, which consists of ring buffers: token n is at entry
n modulo their length. Values written to tail 0 are discarded, as with slot 0. Tails are never cleared: a step reads
only the positions that the row's own numbers name, and these start again with each prefill.
"""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int, Shaped

from mamba_jax.config import StateArray

TailArrays = dict[str, Shaped[Array, "tails entries ..."]]
"""One sublayer's part of every tail, by name."""


@dataclass(frozen=True)
class Replay:
    """Replay settings of running rows; None: a state after each token."""

    interval: int
    """R: a decode step writes a state where it reaches a multiple of it."""
    num_drafts: int
    """K, the most drafts of a step."""

    def entries(self, array: StateArray) -> int:
        """Length of a ring: the tokens that count before a step, and those of one step; a power of two."""
        before = self.interval if array.last is None else array.last
        return 1 << (before + self.num_drafts - 1).bit_length()

    @property
    def longest(self) -> int:
        """Length of the longest rings."""
        return 1 << (self.interval + self.num_drafts - 1).bit_length()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tails:
    """The tails of all seats."""

    layers: tuple[TailArrays, ...]
    """One for each sublayer that keeps something in slots, in model order."""
    hidden: Float[Array, "tails entries hidden"]
    """The hidden states, after the final norm, of each seat's last tokens."""
    tags: Int[Array, "tails entries"] | None
    """Debugging only: which token of its sequence each entry of the longest rings is; -1 = wrong."""
    interval: int = field(metadata={"static": True})
