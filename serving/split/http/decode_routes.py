"""Endpoints of a decode worker. The router announces a state before it sends the request that uses it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from fastapi import APIRouter, Request

from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.split.decode_side import DecodeSide
from serving.split.http.offering import Beat, add_offering, role_router, sweeping, worker_errors
from serving.split.http.peer import HttpPeer
from serving.split.prefill_side import PrefillSide
from serving.split.seal import Seal
from serving.split.wire import SplitError, Ticket

log = logging.getLogger(__name__)

_RENEWAL = 2.0  # seconds between renewals of leases
_HANDSHAKE = 10.0
_AGAIN = 2.0  # seconds before connecting again to a worker that was unreachable
_MAX_PEERS = 256


def decode_router(
    side: DecodeSide,
    *,
    seal: Seal | None = None,
    allowed: Sequence[str] = (),
    keys: Sequence[str] = (),
    sharing: tuple[PrefillSide, str] | None = None,
) -> APIRouter:
    """Returns the endpoints of one decode worker.

    Args:
        side: the worker's decode side.
        seal: authenticates messages; the worker refuses all others.
        allowed: URLs of prefill workers to fetch states from; empty for all workers that signed messages name.
        keys: API keys of the fleet; the first is sent to prefill workers.
        sharing: shares this worker's states with others, which reach it at this URL.
    """
    seal = seal or Seal()
    peers = _Peers(side, seal, allowed, keys)
    beats: list[Beat] = [(_RENEWAL, side.renew)]
    if sharing is not None:
        beats.append(sweeping(sharing[0]))
    router = role_router(side.worker, seal, lambda: {"role": "decode"} | asdict(side.stats), beats, peers.close)
    if sharing is not None:
        add_offering(router, *sharing)

    @router.post("/expect")
    async def expect(ticket: Ticket, request: Request) -> dict[str, bool]:
        """Make the next request for the ticket's prompt continue from the ticket's state."""
        with worker_errors(f"prefill worker {ticket.worker}", otherwise=(502, "peer_unreachable")):
            peer = await peers.get(ticket.worker, ticket.manifest)
            remote = side.accept(peer, ticket)
            if remote is None:
                return {"accepted": False}
            engine = context_of(request).engine
            if ticket.shared and not await engine.call(lambda _: side.worth_fetching(ticket)):
                return {"accepted": False}
            await engine.call(lambda _: side.expect(ticket.prompt_token_ids, remote, ticket.lease))
        return {"accepted": True}

    return router


@dataclass(eq=False)
class _PeerEntry:
    """What is known of a prefill worker."""

    handshake: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One handshake at a time: concurrent first requests share it, and no request waits for that of another worker."""
    peer: HttpPeer | None = None
    failed: tuple[float, str] = (-math.inf, "")
    """When a handshake failed, and why."""


class _Peers:
    """Prefill workers after their handshake: the `_MAX_PEERS` that were used last."""

    def __init__(self, side: DecodeSide, seal: Seal, allowed: Sequence[str], keys: Sequence[str]) -> None:
        self._side, self._seal, self._keys = side, seal, keys
        self._allowed = frozenset(url.rstrip("/") for url in allowed)
        self._entries: dict[str, _PeerEntry] = {}

    async def get(self, url: str, manifest: str) -> HttpPeer:
        """Returns the worker at `url`. Connects again if the worker was restarted, that is, if the digest of its
        manifest is not `manifest`.

        Raises:
            ApiError: the worker is not allowed.
            ManifestMismatch, SplitError: see `HttpPeer.connect`.
        """
        url = url.rstrip("/")
        if self._allowed and url not in self._allowed:
            raise ApiError(403, f"{url[:200]} is not an allowed peer", code="peer_not_allowed")
        entry = self._entries[url] = self._entries.pop(url, _PeerEntry())
        if len(self._entries) > _MAX_PEERS:
            del self._entries[next(iter(self._entries))]
        async with entry.handshake:
            if entry.peer is None or entry.peer.manifest.digest != manifest:
                since, why = entry.failed
                if time.monotonic() - since < _AGAIN:
                    raise SplitError(why)
                timeout = min(_HANDSHAKE, self._side.timeout)
                try:
                    # The previous peer may still be in use; it closes with its last reference.
                    entry.peer = await HttpPeer.connect(
                        url, self._side.worker.manifest, seal=self._seal, keys=self._keys, timeout=timeout
                    )
                except SplitError as error:
                    entry.failed = time.monotonic(), str(error)
                    raise
            return entry.peer

    async def close(self) -> None:
        for entry in self._entries.values():
            if entry.peer is not None:
                await entry.peer.close()
