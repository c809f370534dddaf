"""Tracks changes of page tables that must be sent to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mamba_jax.batch import PageTableBatch
from serving.core.planning.plan import DecodeRow, PrefillRow


class PageTables:
    """Sends changes of page tables. The device stores the tables by seat (`Rows.page_table`).

    At a model's full length, the tables of a step have megabytes, but few entries are new: one for each row that has
    filled its last page. A step has room for a few changes. A table with more changes is sent whole before the step.
    """

    def __init__(self, num_rows: int, pages_per_row: int) -> None:
        self._pages_per_row = pages_per_row
        # The table that each seat's table on the device was copied from, and the number of its first entries that may
        # differ from 0.
        self._sent: list[Sequence[int] | None] = [None] * (num_rows + 1)
        self._count = [0] * (num_rows + 1)
        self._whole: list[PageTableBatch] = []

    def clear(self, row_id: int) -> None:
        """Records that a request takes a seat, which sets the seat's table on the device to zeros."""
        self._sent[row_id], self._count[row_id] = None, 0

    def forget(self) -> None:
        """Makes later batches send every table again, because earlier ones may not have reached the device."""
        self._sent = [None] * len(self._sent)
        self._count = [self._pages_per_row] * len(self._count)
        self._whole = []

    def fill(self, updates: Any, rows: Sequence[DecodeRow | PrefillRow]) -> None:
        """Writes the changes of these rows' tables to an array of zeros [updates, 3], as far as there is room."""
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
        """Returns the tables since the last call whose changes did not fit into batches. They must run before these
        batches."""
        whole, self._whole = self._whole, []
        return whole

    def _table(self, seat: int, table: Sequence[int]) -> PageTableBatch:
        pages = np.zeros(self._pages_per_row, np.int32)
        pages[: len(table)] = table[: self._pages_per_row]
        row_id: Any = np.int32(seat)
        return PageTableBatch(row_id=row_id, pages=pages)  # type: ignore[arg-type]
