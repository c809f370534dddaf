"""Reads the experts that a sequence's tokens went through from the pages of the store."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int

from mamba_jax.store import Store
from serving.core import ResultDisposition, Row

_PAGES = 64
"""Pages that one call reads, so that only one program is compiled."""


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a sequence's tokens, on the device until `numpy` is called."""

    pieces: tuple[Int[Array, "pages page_size 1 choices"], ...]
    num_tokens: int
    per_layer: int
    """Experts of a token in one layer."""

    def numpy(self) -> Int[np.ndarray, "tokens layers chosen"]:
        """Returns the numbers of the experts. Waits for the device if necessary."""
        rows = np.concatenate([np.asarray(piece).reshape(-1, piece.shape[-1]) for piece in self.pieces])
        return rows[: self.num_tokens].reshape(self.num_tokens, -1, self.per_layer)


def read_routed_experts(store: Store, row: Row, num_tokens: int, *, per_layer: int) -> RoutedExperts | None:
    """Reads the experts of a request's first tokens, without waiting for the device.

    Call this when its last row is settled: a step that is dispatched later may write its pages.

    Args:
        store: a store that records experts.
        row: the row whose tokens ended the request.
        num_tokens: number of tokens.
        per_layer: experts of a token in one layer.

    Returns:
        None if the request lost its pages while the row was in flight, because it was preempted.
    """
    if row.fate is ResultDisposition.DETACHED:
        return None
    experts, pages = store.experts, row.pages
    assert experts is not None
    count = -(-num_tokens // store.page_size)
    pieces = []
    for start in range(0, count, _PAGES):
        ids = np.zeros(_PAGES, np.int32)
        part = pages[start : min(start + _PAGES, count)]
        ids[: len(part)] = part
        pieces.append(_read(experts, ids))
        pieces[-1].copy_to_host_async()
    return RoutedExperts(tuple(pieces), num_tokens, per_layer)


@jax.jit
def _read(
    experts: Int[Array, "pages page_size 1 choices"], ids: Int[Array, " n"]
) -> Int[Array, "n page_size 1 choices"]:
    return experts[ids]
