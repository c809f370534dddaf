"""The tokens of a decode step whose rows have an anchor and the inputs since then; see `mamba_jax.tails`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from kernels_pallas.places import Anchored
from kernels_pallas.tails import read_ring, write_ring
from mamba_jax.layout.decode import DecodeLayout
from mamba_jax.layout.operation import Inputs, Operation, Parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplayLayout(DecodeLayout):
    """A `DecodeLayout` whose `read_slot` is the anchor's and whose `write_slot` [rows, 1] is the spare slot."""

    tail_id: Int[Array, " rows"]
    """0 = padding."""
    anchor: Int[Array, " rows"]
    """Tokens that the anchor has absorbed."""
    length: Int[Array, " rows"]
    """Tokens that the row has absorbed."""
    num_tokens: Int[Array, " rows"]
    interval: int = field(metadata={"static": True})

    @classmethod
    def from_anchor(
        cls,
        *,
        length: Int[Array, " rows"],
        num_tokens: Int[Array, " rows"],
        read_slot: Int[Array, " rows"],
        anchor: Int[Array, " rows"],
        tail_id: Int[Array, " rows"],
        write_slot: Int[Array, "rows writes"],
        page_table: Int[Array, "rows pages"],
        steps: int,
        interval: int,
    ) -> Self:
        """Returns the layout of rows that have absorbed `length` tokens, `anchor` of them in their slots."""
        step = jnp.arange(steps)
        valid = step < num_tokens[:, None]
        return cls(
            positions=jnp.where(valid, length[:, None] + step, -1).reshape(-1),
            valid=valid.reshape(-1),
            # A row without tokens (padding, or one that only samples) must not move any state about.
            read_slot=jnp.where(num_tokens > 0, read_slot, 0),
            write_slot=write_slot,
            page_table=page_table,
            tail_id=tail_id,
            anchor=anchor,
            length=length,
            num_tokens=num_tokens,
            interval=interval,
        )

    @property
    def next_multiple(self) -> Int[Array, " rows"]:
        """The first multiple of the interval after the row's length."""
        return (self.length // self.interval + 1) * self.interval

    @property
    def due_slot(self) -> Int[Array, " rows"]:
        """The slot for the state at that multiple; 0 if the fed tokens, rejected drafts included, do not reach it."""
        reached = self.next_multiple <= self.length + self.num_tokens
        return jnp.where(reached, self.write_slot[:, 0], 0)

    @property
    def anchored(self) -> Anchored:
        """The places of the rows' anchors and tails."""
        return Anchored(
            anchor_slot=self.read_slot,
            tail_id=self.tail_id,
            anchor_length=self.anchor,
            length=self.length,
            num_tokens=self.num_tokens,
            write_slot=self.due_slot,
            interval=self.interval,
        )

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        assert operation.replay is not None, "an operation that has no form for replay"
        return operation.replay(self, inputs, parameters, state)

    def append(
        self, ring: Shaped[Array, "tails entries *shape"], values: Shaped[Array, "rows steps *shape"]
    ) -> Shaped[Array, "tails entries *shape"]:
        """Returns the tails with the step's own tokens."""
        position = self.length[:, None] + jnp.arange(values.shape[1])
        return write_ring(ring, values, self.tail_id, position, self.by_block(self.valid))

    def is_tail_right(self, tags: Int[Array, "tails entries"]) -> Bool[Array, " rows"]:
        """For debugging: whether the tail holds exactly the tokens since the anchor, and has room for the step's."""
        entries = tags.shape[1]
        position = self.anchor[:, None] + jnp.arange(entries)
        there = position < self.length[:, None]
        held = read_ring(tags, self.tail_id, position)
        fits = (self.anchor <= self.length) & (self.length + self.num_tokens - self.anchor <= entries)
        return fits & (~there | (held == position)).all(axis=1)
