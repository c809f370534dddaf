"""Tails on TPU: they stay in HBM, and the kernel copies only the entries that a row needs, one row ahead of their use.

Entries are copied in groups, the rows of a register. The kernel fetches groups with tokens since the anchor and groups
that get new tokens, and writes the latter back. It accesses no other entry.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

_TOGETHER = 8  # entries of a group
_start, _wait = (operator.methodcaller(name) for name in ("start", "wait"))
_HELD = 3  # rows whose tails are in VMEM: the current one, the next one, and one that is being written back


def registers(ring: Shaped[Array, "tails entries channels"]) -> Shaped[Array, "tails n few channels"]:
    """Reshapes the entries into groups; on a TPU this moves no data."""
    tails, entries, channels = ring.shape
    together = min(entries, _TOGETHER)
    return ring.reshape(tails, entries // together, together, channels)


def scratch(rings: Sequence[jax.Array]) -> list[Any]:
    """Returns the scratch memory of `TailCopies`: tails as by `registers`, and semaphores for both directions."""
    held = [pltpu.VMEM((_HELD, *ring.shape[1:]), ring.dtype) for ring in rings]
    return [held, pltpu.SemaphoreType.DMA((_HELD,)), pltpu.SemaphoreType.DMA((_HELD,))]


def moved_entries(entries: int, steps: int, interval: int) -> float:
    """Returns how many entries a row fetches and writes in a step, averaged over positions within an interval."""
    together = min(entries, _TOGETHER)
    most, total = entries // together, 0
    for before in range(interval):
        ends = (before + steps - 1) // together + 1
        total += min(ends, most) + min(ends - before // together, most)
    return total * together / interval


@dataclasses.dataclass(frozen=True)
class TailCopies:
    """Copies tails in a kernel whose grid runs from row to row."""

    rows: Any
    """References by row: anchor_length, length, num_tokens (0: the row has no tail) and tail_id."""
    there: Sequence[Any]
    """The arrays of all tails in the form of `registers`, in HBM; updated in place."""
    held: Sequence[Any]
    fetched: Any
    written: Any

    def bring(self, row: Any, last: Any) -> None:
        """Starts to fetch the next row's tail and waits for this row's; call it before computing. `last`: last row."""
        pl.when(row == 0)(lambda: self._fetch(row, _start))
        # The next row's tail replaces that of the row before the previous one.
        pl.when(row >= _HELD - 1)(lambda: self._write(row - (_HELD - 1), _wait))
        pl.when(row < last)(lambda: self._fetch(row + 1, _start))
        self._fetch(row, _wait)

    def at_hand(self, row: Any) -> list[Any]:
        """Returns the row's tails, [groups, entries of each, channels]; groups that it does not need are undefined."""
        return [held.at[lax.rem(row, _HELD)] for held in self.held]

    def put_back(self, row: Any, last: Any) -> None:
        """Starts to write a row's new tokens back; call it after they have been added to the tail in VMEM."""
        self._write(row, _start)

        @pl.when(row == last)
        def _() -> None:
            pl.when(row > 0)(lambda: self._write(row - 1, _wait))
            self._write(row, _wait)

    def _fetch(self, row: Any, act: Any) -> None:
        self._copy(row, self.rows.anchor_length, act, lambda there, held, place: (there, held, self.fetched.at[place]))

    def _write(self, row: Any, act: Any) -> None:
        self._copy(row, self.rows.length, act, lambda there, held, place: (held, there, self.written.at[place]))

    def _copy(self, row: Any, first: Any, act: Any, ends: Any) -> None:
        """Applies `act` to a copy of each group with tokens from `first` on."""
        groups, together = self.there[0].shape[1:3]
        place = lax.rem(row, _HELD)
        after = self.rows.length[row] + self.rows.num_tokens[row]

        def of_group(number: Any, carry: Any) -> Any:
            group = number & (groups - 1)
            for there, held in zip(self.there, self.held, strict=True):
                source, target, done = ends(there.at[self.rows.tail_id[row], group], held.at[place, group], place)
                act(pltpu.make_async_copy(source, target, done))
            return carry

        @pl.when(self.rows.num_tokens[row] > 0)
        def _() -> None:
            lax.fori_loop(lax.div(first[row], together), lax.div(after - 1, together) + 1, of_group, 0)
