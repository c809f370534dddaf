"""The decode worker's side: fetches the states that its requests wait for, and writes them to the store.

Threads fetch; only the engine's thread uses the engine and the store. Arrays are verified (shapes, and checksums with
`debug_state`) before they are written. If a state does not arrive in time, counted from the request's batch row, the
failure policy decides whether to compute the prompt here or to fail the request.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from serving.core.cache.content import Scope
from serving.core.requests.request import RemoteLoad, RemoteState
from serving.engine.requests.adapters import AdapterNames
from serving.split.prefill_side import Peer, TooMany
from serving.split.settings import SplitSettings
from serving.split.transports import TransportError
from serving.split.wire import (
    AdapterMismatch,
    ManifestMismatch,
    Offer,
    SplitError,
    SplitTimeout,
    StateRequest,
    Ticket,
    check,
)
from serving.split.worker import Specs, Worker, checksums, point_specs, shapes_of
from serving.state_transfer.programs import Piece, common_unit, num_bytes
from serving.state_transfer.source import Arrival, Loop, StateSource

log = logging.getLogger(__name__)

_UNRESPONSIVE_SECONDS = 5.0  # seconds without requests to a worker that did not answer
_RETRY = 0.05  # seconds before asking again a worker that has no room for a copy
PEER = "peer"  # name of other workers in the table of fetch times per tier
MAX_EXPECTED = 4096  # maximum number of announced requests


@dataclass(frozen=True)
class RemoteTicket:
    """The peer and the ticket of a remote state: the handle of `RemoteState`."""

    peer: Peer
    ticket: Ticket
    until: float = math.inf  # the request's deadline, by this machine's monotonic clock


@dataclass
class DecodeStats:
    """Counters of the states that this worker's requests waited for."""

    arrived: int = 0
    failed: int = 0  # did not arrive, or failed verification
    dearer: int = 0  # shared states not fetched, because computing was expected to be faster
    late: int = 0  # arrived after the request stopped waiting
    spared: int = 0  # not fetched, because the cache had the whole prefix or the request ended
    received_bytes: int = 0
    pages: int = 0  # pages written from arrived states
    pages_spared: int = 0  # pages found in the cache, and not sent
    fetch_seconds: float = 0.0  # total time from the first message to the other worker until the state arrived


class DecodeSide(StateSource):
    """Belongs to one engine.

    Args:
        worker: the engine, its manifest and its transports.
        settings: the policy for a request whose state does not arrive, and the limits of fetches. One state in
            transfer is always allowed.
        executor: runs fetches; None: the engine's thread runs them.
    """

    def __init__(
        self, worker: Worker, settings: SplitSettings | None = None, *, executor: Executor | None = None
    ) -> None:
        self.worker, self.settings = worker, settings or SplitSettings.create()
        self.stats = DecodeStats()
        self._executor, table = executor, worker.engine.adapters
        self._adapters = AdapterNames() if table is None else table.names
        self._fetching = 0  # fetches whose results the engine's thread has not taken
        self._unresponsive: dict[Peer, float] = {}
        self._arriving = 0  # bytes of states in transfer
        self._room = threading.Condition()
        """Guards `_arriving`, which both the fetching threads and the engine's thread change."""
        self._expected: dict[tuple[Scope | None, tuple[int, ...]], list[tuple[float, RemoteState]]] = {}
        worker.loop.sources.append(self)

    def expect(self, prompt: Sequence[int], remote: RemoteState, lease: float) -> None:
        """Makes the next request for this prompt, with the state's salt and adapter, use a remote state, if the request
        arrives before the state's lease expires. Announcing a state again does nothing.

        Raises:
            TooMany: `MAX_EXPECTED` requests are announced.
        """
        now = time.monotonic()
        kept = {key: [each for each in waiting if each[0] > now] for key, waiting in self._expected.items()}
        self._expected = {key: waiting for key, waiting in kept.items() if waiting}
        waiting = self._expected.get((remote.scope, tuple(prompt)), [])
        if any(each.handle.ticket.id == remote.handle.ticket.id for _, each in waiting):
            return
        if sum(map(len, self._expected.values())) >= MAX_EXPECTED:
            raise TooMany(f"{MAX_EXPECTED} requests are already announced")
        self._expected[remote.scope, tuple(prompt)] = [*waiting, (now + lease, remote)]

    def worth_fetching(self, ticket: Ticket) -> bool:
        """Returns whether fetching a shared state is expected to be faster than computing its tokens here."""
        worker, scheduler = self.worker, self.worker.loop.scheduler
        if scheduler.cache.weights:
            return False
        here, _ = scheduler.reusable(ticket.prompt_token_ids, ticket.salt, ticket.adapter, {})
        count, layers = ticket.position - here, worker.manifest.attention_layers + worker.manifest.draft_layers
        kv = num_bytes([worker.kv]) if worker.kv is not None else 0
        size = num_bytes(worker.state.values()) + count * layers * kv
        paid = count > 0 and scheduler.fetch_costs.worth_fetching(PEER, size + self._arriving, count)
        self.stats.dearer += not paid
        return paid

    def find(self, prompt: Sequence[int], scope: Scope) -> RemoteState | None:
        """Returns the state that `expect` announced for this prompt and scope, if it has not expired."""
        waiting = self._expected.get((scope, tuple(prompt)), []) if self._expected else []
        while waiting:
            until, remote = waiting.pop(0)
            if until > time.monotonic():
                return remote
        return None

    def accept(self, peer: Peer, ticket: Ticket) -> RemoteState | None:
        """Returns the remote state for a request with the ticket's prompt; None if there is nothing to fetch.

        Raises:
            ManifestMismatch: the two workers cannot exchange states.
            AdapterMismatch: this worker does not have the ticket's adapter, or has other content under its name.
        """
        for notice in check(peer.manifest, self.worker.manifest):
            log.info("%s", notice)
        if ticket.position < 1:
            return None
        if ticket.position > len(ticket.prompt_token_ids):
            raise ManifestMismatch(f"the state of ticket {ticket.id} covers more tokens than its prompt")
        if ticket.adapter_name is not None:
            self._check_adapter(ticket.adapter_name, ticket.adapter)
        until = time.monotonic() + ticket.patience if ticket.patience else math.inf
        # Workers of a split never replace their weights, and the manifest contains the weights' digest.
        scope = Scope(ticket.salt, adapter=ticket.adapter)
        cached, written = ticket.cached_tokens, dict(ticket.written_tokens)
        return RemoteState(ticket.position, self, RemoteTicket(peer, ticket, until), cached, written, scope=scope)

    def _check_adapter(self, name: str, digest: str | None) -> None:
        _, own = self._adapters.get(name, (None, None))
        if own is None:
            raise AdapterMismatch(f"adapter {name!r} is not loaded on the decode worker; load it there, too")
        if own != digest:
            raise AdapterMismatch(
                f"adapter {name!r} has other content on the prefill worker ({digest}) than on the decode worker "
                f"({own}); load the same files on both"
            )

    def renew(self) -> None:
        """Renews the leases of the states that requests still wait for. Call this several times per lease."""
        now, scheduler = time.monotonic(), self.worker.loop.scheduler
        waiting = [remote for each in self._expected.values() for until, remote in each if until > now]
        remotes = (request.transfer.remote for request in (*scheduler.queues.waiting, *scheduler.queues.running))
        waiting += [remote for remote in remotes if remote is not None]
        by_peer: defaultdict[Peer, list[str]] = defaultdict(list)
        for remote in waiting:
            if now < remote.handle.until:
                by_peer[remote.handle.peer].append(remote.handle.ticket.id)
        for peer, ids in by_peer.items():
            peer.renew(ids)

    # -- called by the engine's loop --

    shared_with_workers = True

    @property
    def busy(self) -> bool:
        """Whether fetches are unfinished. The bytes of unfinished fetches count as arriving."""
        return self._fetching > 0

    def fetch(self, loop: Loop, load: RemoteLoad) -> None:
        self._fetching += 1
        loop.inbox.awaited += 1
        self._run(self._fetch, loop, load, time.monotonic())

    def cancel(self, remote: RemoteState) -> None:
        """Tells the other worker that this state is not needed."""
        self.stats.spared += 1
        self._run(_release, remote.handle, False)

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._executor is None:
            function(*arguments)
        else:
            self._executor.submit(function, *arguments)

    # -- called in fetching threads --

    def _fetch(self, loop: Loop, load: RemoteLoad, begin: float) -> None:
        source: RemoteTicket = load.remote.handle
        until = min(source.until, begin + self.settings.fetch_timeout)
        fetched, arrival = False, Arrival(load)
        try:
            if time.monotonic() < self._unresponsive.get(source.peer, 0.0):
                raise SplitError("the other worker did not answer recently")
            want, specs, cut = self._wanted(load, source)
            arrival.bytes = self._reserve(num_bytes(specs), until)
            offer = self._ask(load, source, want, specs, until)
            arrays = self.worker.transports[want.transport].fetch(
                offer.address, offer.key, specs, max(0.001, until - time.monotonic())
            )
            fetched = True
            _verify(offer, specs, arrays)
            starts = [piece.start for piece in cut]
            arrival.pieces = list(zip(starts, arrays[len(self.worker.state) :], strict=False))
            arrival.state = dict(zip(self.worker.state, arrays, strict=False))
        except (SplitError, TransportError) as error:
            if isinstance(error, SplitTimeout):
                self._unresponsive[source.peer] = time.monotonic() + _UNRESPONSIVE_SECONDS
            arrival.error = str(error)
        except Exception as error:  # after any error, the request must stop waiting
            log.exception("fetching state %s failed", source.ticket.id)
            arrival.error = f"{type(error).__name__}: {error}"
        arrival.seconds = time.monotonic() - begin
        loop.inbox.post(lambda: self._take(loop, arrival))
        _release(source, fetched)

    def _reserve(self, size: int, until: float) -> int:
        """Waits until `size` more bytes may arrive. Returns `size`."""
        with self._room:
            if not self._room.wait_for(
                lambda: not self._arriving or self._arriving + size <= self.settings.max_transfer_bytes,
                max(0.0, until - time.monotonic()),
            ):
                raise SplitError(f"receive buffer full ({self._arriving:,} bytes in transfer, {size:,} requested)")
            self._arriving += size
        return size

    def _wanted(self, load: RemoteLoad, source: RemoteTicket) -> tuple[StateRequest, Specs, list[Piece]]:
        """Returns the request for the missing part of a state, and the expected arrays and pieces."""
        worker, theirs = self.worker, source.peer.manifest
        ours = worker.manifest
        want = StateRequest(
            id=source.ticket.id,
            start=load.start if load.pages else load.position,
            unit=common_unit(theirs.page_size, ours.page_size),
            layers=ours.attention_layers + ours.draft_layers,
            # The first of this worker's transports that the other one has too.
            transport=next(name for name in ours.transports if name in theirs.transports),
            manifest=theirs.digest,
            checksum=worker.verify,
        )
        specs, cut = point_specs(worker, want, load.position, theirs.ssm_dtype)
        return want, specs, cut

    def _ask(self, load: RemoteLoad, source: RemoteTicket, want: StateRequest, specs: Specs, until: float) -> Offer:
        """Returns the other worker's offer. Retries while it has no room."""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise SplitError("the state was not offered in time")
            try:
                offer = source.peer.offer(want, left)
                break
            except TooMany:
                if left < _RETRY:
                    raise
                time.sleep(_RETRY)
        if offer.position != load.position:
            raise SplitError(f"state {offer.id} covers {offer.position} tokens, expected {load.position}")
        if [(tuple(shape), dtype) for shape, dtype in offer.shapes] != shapes_of(specs):
            raise SplitError(f"state {offer.id} was offered with unexpected shapes")
        return offer

    # -- called in the engine's thread --

    def _take(self, loop: Loop, arrival: Arrival) -> None:
        self._fetching -= 1
        loop.inbox.awaited -= 1
        with self._room:
            self._arriving -= arrival.bytes
            self._room.notify_all()
        load = arrival.load
        if not load.valid:
            self.stats.late += 1
            return
        if arrival.state is None:
            self.stats.failed += 1
            request = load.request
            if self.settings.on_failure == "fail" and not load.remote.handle.ticket.shared:
                self.worker.engine.fail(request.request_id, f"the prompt's state could not be fetched: {arrival.error}")
            else:
                log.warning("request %s computes its prompt on this worker: %s", request.request_id, arrival.error)
                loop.scheduler.lost(load)
            return
        page_size, stats = self.worker.manifest.page_size, self.stats
        arrival.write(loop, self.worker.programs, page_size)
        loop.scheduler.fetch_costs.fetched(PEER, arrival.bytes, arrival.seconds)
        stats.arrived += 1
        stats.fetch_seconds += arrival.seconds
        stats.received_bytes += arrival.bytes
        stats.pages += len(load.pages)
        stats.pages_spared += load.start // page_size if page_size else 0


def _release(source: RemoteTicket, wanted: bool) -> None:
    source.peer.release(source.ticket.id, wanted=wanted)


def _verify(offer: Offer, specs: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Checks the arrived arrays before they are written."""
    if shapes_of(arrays) != shapes_of(specs):
        raise SplitError(f"state {offer.id} arrived with unexpected shapes")
    if offer.checksums is not None and checksums(arrays) != offer.checksums:
        raise SplitError(f"state {offer.id} is damaged: its checksums differ")
