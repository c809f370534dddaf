"""A decode worker's interface to a prefill worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving.split.manifest import Manifest
from serving.split.prefill_side import PrefillSide
from serving.split.wire import Offer, StateRequest


class Peer(Protocol):
    """A prefill worker. Calls may block, and may come from any thread."""

    @property
    def manifest(self) -> Manifest:
        """The prefill worker's manifest; callers check it first."""
        ...

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        """Requests an offer; see `PrefillSide.offer`. Also raises `SplitError` if the worker does not answer within
        `seconds`."""
        ...

    def renew(self, ids: Sequence[str]) -> None:
        """Renews leases; see `PrefillSide.renew`. Never raises or blocks."""
        ...

    def release(self, id: str, *, wanted: bool) -> None:
        """Releases a state; see `PrefillSide.release`. Never raises or blocks, because leases expire anyway."""
        ...


class DirectPeer:
    """A prefill worker in the same process, driven by the same thread."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side

    @property
    def manifest(self) -> Manifest:
        return self.side.worker.manifest

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        return self.side.offer(want)

    def renew(self, ids: Sequence[str]) -> None:
        self.side.renew(ids)

    def release(self, id: str, *, wanted: bool) -> None:
        self.side.release(id, wanted=wanted)
