"""How a decode worker asks a prefill worker for what it keeps."""

from __future__ import annotations

from typing import Protocol

from serving.disagg.manifest import Manifest
from serving.disagg.prefill_side import PrefillSide
from serving.disagg.wire import Offer, Want


class Peer(Protocol):
    """A prefill worker, as seen by others. Calls may take a while, and may come from any thread."""

    @property
    def manifest(self) -> Manifest:
        """Checked before anything else is asked."""
        ...

    def offer(self, want: Want) -> Offer:
        """See `PrefillSide.offer`. Raises `SplitError`, also where the worker cannot be reached."""
        ...

    def release(self, id: str, *, wanted: bool) -> None:
        """See `PrefillSide.release`. Never raises: a lease runs out by itself."""
        ...


class DirectPeer:
    """A prefill worker in the same process, driven by the same thread."""

    def __init__(self, side: PrefillSide) -> None:
        self.side = side

    @property
    def manifest(self) -> Manifest:
        return self.side.worker.manifest

    def offer(self, want: Want) -> Offer:
        return self.side.offer(want)

    def release(self, id: str, *, wanted: bool) -> None:
        self.side.release(id, wanted=wanted)
