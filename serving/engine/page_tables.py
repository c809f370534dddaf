"""The page tables on the device: what has changed of them since a step was last told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_jax.batch import PageTableBatch
from serving.core import DecodeRow, PrefillRow


class PageTables:
    """Sends the changes of page tables, which the device keeps by seat (`Rows.page_table`).

    At a model's full length the tables of a step are megabytes, and few of their pages are new: one for each row that
    has filled its last one. A step has room for a few changes; a table that changed by more is sent whole before it.
    """

    def __init__(self, num_rows: int, pages_per_row: int) -> None:
        self._pages_per_row = pages_per_row
        # What each seat's table on the device was sent from, and how many of its first entries may not be 0.
        self._sent: list[Sequence[int] | None] = [None] * (num_rows + 1)
        self._count = [0] * (num_rows + 1)
        self._whole: list[PageTableBatch] = []

    def clear(self, row_id: int) -> None:
        """A request takes a seat, which sets the seat's table to zeros."""
        self._sent[row_id], self._count[row_id] = None, 0

    def forget(self) -> None:
        """Send every table again: what the device has is unknown."""
        self._sent = [None] * len(self._sent)
        self._count = [self._pages_per_row] * len(self._count)
        self._whole = []

    def fill(self, updates: Any, rows: Sequence[DecodeRow | PrefillRow]) -> None:
        """The changes of these rows' tables into an array of zeros [updates, 3], those that it has room for."""
        sent, count, at = self._sent, self._count, 0
        for row in rows:
            seat, table = row.row_id, row.pages
            length, before = len(table), count[seat]
            start = table.changed if sent[seat] is table else 0
            end = max(length, before)
            if start == end:
                continue
            sent[seat], count[seat], table.changed = table, length, length
            if end - start > len(updates) - at:
                self._whole.append(self._table(seat, table))
                continue
            part = updates[at : at + end - start]
            part[:, 0], part[:, 1] = seat, range(start, end)
            part[: length - start, 2] = table[start:]
            at += end - start

    def take_whole(self) -> list[PageTableBatch]:
        """The tables that no array of changes had room for, since the last call."""
        whole, self._whole = self._whole, []
        return whole

    def _table(self, seat: int, table: Sequence[int]) -> PageTableBatch:
        pages = np.zeros(self._pages_per_row, np.int32)
        pages[: len(table)] = table[: self._pages_per_row]
        row_id: Any = np.int32(seat)
        return PageTableBatch(row_id=row_id, pages=pages)  # type: ignore[arg-type]
