"""How a decode worker asks a prefill worker for what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serving.split.manifest import Manifest
from serving.split.prefill_side import PrefillSide
from serving.split.wire import Offer, StateRequest


class Peer(Protocol):
    """A prefill worker, as seen by others. Calls may take a while, and may come from any thread."""

    @property
    def manifest(self) -> Manifest:
        """Checked before anything else is asked."""
        ...

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        """See `PrefillSide.offer`; within so many seconds. Raises `SplitError`, also where it cannot be reached."""
        ...

    def renew(self, ids: Sequence[str]) -> None:
        """See `PrefillSide.renew`. Never raises and never waits."""
        ...

    def release(self, id: str, *, wanted: bool) -> None:
        """See `PrefillSide.release`. Never raises and never waits: a lease expires by itself."""
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
