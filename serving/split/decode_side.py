"""The decode worker's side: fetches the states that its requests wait for, and puts them into the store.

Fetching happens in threads, everything that touches engine or store in the engine's. What arrives is looked at first
(length, and checksums with `debug_state`), and only then written and made findable. What does not arrive in time is
computed here, or fails its request: that is the failure policy. Time runs from the moment that a request has its seat,
whatever the fetch then waits for; a worker that has let one request wait in vain is not asked for the next ones.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from serving.core import RemoteLoad, RemoteState, StepPlan
from serving.core.cache.prefix_tree import Scope
from serving.engine.loop import StepLoop
from serving.points.point import Piece, common_unit
from serving.split.manifest import ManifestMismatch, check
from serving.split.peer import Peer
from serving.split.prefill_side import TooMany
from serving.split.transport import TransportError
from serving.split.wire import FailurePolicy, Offer, SplitError, SplitTimeout, StateRequest, Ticket
from serving.split.worker import Worker, checksums, point_specs, shapes_of

log = logging.getLogger(__name__)

_PATIENCE = 0.002  # seconds that an idle engine waits for an arrival before it looks again


_SHUNNED = 5.0
"""Seconds for which nothing is asked of a worker that has not answered."""
_RETRY = 0.05
"""Seconds before a worker that has no room for a copy is asked again."""
PEER = "peer"
"""What other workers are called among the tiers that fetching from takes time."""
MAX_EXPECTED = 4096
"""Requests that may be announced at once."""


@dataclass(frozen=True)
class Source:
    """Where a remote state can be fetched."""

    peer: Peer
    ticket: Ticket
    until: float = math.inf
    """When the request has waited long enough, by this machine's clock."""


@dataclass
class DecodeStats:
    """What has become of the states that this worker's requests waited for."""

    arrived: int = 0
    failed: int = 0
    """Did not come, or came wrong."""
    dearer: int = 0
    """Shared states that computing was expected to be sooner than, or that were here already."""
    late: int = 0
    """Arrived after the request had stopped waiting."""
    spared: int = 0
    """The cache had all of it, or the request ended before."""
    received_bytes: int = 0
    pages: int = 0
    """Written with what has arrived."""
    pages_spared: int = 0
    """Found in the cache, and not sent."""
    fetch_seconds: float = 0.0
    """From the first word to the other worker until all had come."""


@dataclass(eq=False)
class _Arrival:
    load: RemoteLoad
    arrays: list[Any] | None
    """None: it did not come."""
    pieces: list[Piece]
    error: str
    seconds: float
    bytes: int
    """Reserved for it among the arriving ones."""


class DecodeSide:
    """Belongs to one engine.

    Args:
        worker: the engine and what it fetches with.
        policy: what becomes of a request whose state does not arrive.
        executor: runs the fetching; None = at once, in the engine's thread.
        timeout: seconds that a fetch may take.
        max_arriving_bytes: of states on their way, at most. One may always come.
        fail: ends a request with an error: (request id, reason).
    """

    def __init__(
        self,
        worker: Worker,
        *,
        policy: FailurePolicy = "recompute",
        executor: Executor | None = None,
        timeout: float = 30.0,
        max_arriving_bytes: int = 1 << 30,
        fail: Callable[[str, str], None] | None = None,
    ) -> None:
        self.worker, self.policy, self.timeout = worker, policy, timeout
        self.stats = DecodeStats()
        self._executor, self._fail = executor, fail
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._under_way = 0
        self._shunned: dict[Peer, float] = {}
        self._max_arriving, self._arriving = max_arriving_bytes, 0
        self._room = threading.Condition()
        """For `_arriving`: changed by fetching threads and the engine's."""
        self._expected: dict[tuple[int, ...], list[tuple[float, RemoteState]]] = {}
        worker.loop.connect(self)

    def expect(self, prompt: Sequence[int], remote: RemoteState, lease: float) -> None:
        """The next request for this prompt is to use a remote state, if it comes before the state's lease runs out.

        Raises:
            TooMany: as many are expected as may be.
        """
        now = time.monotonic()
        for key in list(self._expected):
            self._expected[key] = [each for each in self._expected[key] if each[0] > now]
            if not self._expected[key]:
                del self._expected[key]
        if sum(map(len, self._expected.values())) >= MAX_EXPECTED:
            raise TooMany(f"{MAX_EXPECTED} requests are expected already")
        self._expected.setdefault(tuple(prompt), []).append((now + lease, remote))

    def pays(self, ticket: Ticket) -> bool:
        """Whether fetching a shared state is expected to take less time than computing its tokens here."""
        worker, scheduler = self.worker, self.worker.scheduler
        if scheduler.weights_replaced:
            return False
        index = scheduler.index
        match = index.find(ticket.prompt_token_ids, Scope(None)) if index is not None else None
        here = match.position if match is not None else 0
        kv = math.prod(worker.kv.shape) * worker.kv.dtype.itemsize if worker.kv is not None else 0
        layers = worker.manifest.attention_layers + worker.manifest.draft_layers
        size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in worker.state.values())
        size += (ticket.position - here) * layers * kv
        paid = ticket.position > here and scheduler.prices.worth_fetching(PEER, size + self._arriving,
                                                                         ticket.position - here)  # fmt: skip
        self.stats.dearer += not paid
        return paid

    def find(self, prompt: Sequence[int]) -> RemoteState | None:
        """The state that `expect` announced for this prompt, if it has not expired."""
        if not self._expected:
            return None
        waiting = self._expected.pop(tuple(prompt), [])
        while waiting:
            until, remote = waiting.pop(0)
            if until > time.monotonic():
                if waiting:
                    self._expected[tuple(prompt)] = waiting
                return remote
        return None

    def accept(self, peer: Peer, ticket: Ticket) -> RemoteState | None:
        """What a request for the ticket's prompt is to be added with; None where nothing needs to come.

        Raises:
            ManifestMismatch: the two workers cannot exchange states.
        """
        for notice in check(peer.manifest, self.worker.manifest):
            log.info("%s", notice)
        if ticket.position < 1:
            return None
        if ticket.position > len(ticket.prompt_token_ids):
            raise ManifestMismatch(f"ticket {ticket.id} has a state of more tokens than its prompt")
        until = time.monotonic() + ticket.patience if ticket.patience else math.inf
        return RemoteState(ticket.position, Source(peer, ticket, until), ticket.cached_tokens)

    def renew(self) -> None:
        """Tell other workers which of their states are still waited for. To be called several times a lease."""
        now, scheduler = time.monotonic(), self.worker.scheduler
        waiting = [remote for each in self._expected.values() for until, remote in each if until > now]
        asked = (request.transfer.remote for request in (*scheduler.waiting, *scheduler.running))
        waiting += [remote for remote in asked if remote is not None]
        by_peer: defaultdict[Peer, list[str]] = defaultdict(list)
        for remote in waiting:
            if now < remote.source.until:
                by_peer[remote.source.peer].append(remote.source.ticket.id)
        for peer, ids in by_peer.items():
            peer.renew(ids)

    # -- of the loop --

    @property
    def busy(self) -> bool:
        """Whether a peer must still be told that a state is not needed."""
        return self.worker.scheduler.has_unneeded_remotes or self._under_way > 0

    def dispatched(self, loop: StepLoop, plan: StepPlan) -> None:
        """Nothing of a step concerns other workers here."""

    def exchange(self, loop: StepLoop) -> None:
        """Start fetching what is newly waited for; take in what has come."""
        scheduler = loop.scheduler
        for load in scheduler.take_loads():
            if load.valid:
                self._under_way += 1
                self._run(self._fetch, load, time.monotonic())
        for remote in scheduler.pop_unneeded_remotes():
            self.stats.spared += 1
            self._run(_release, remote.source, False)
        patience = _PATIENCE if self._under_way and not loop.in_flight else 0.0
        while True:
            try:
                arrival = self._arrivals.get(block=patience > 0, timeout=patience or None)
            except queue.Empty:
                return
            patience = 0.0
            self._under_way -= 1
            self._take(loop, arrival)
            with self._room:
                self._arriving -= arrival.bytes
                self._room.notify_all()

    def _run(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._executor is None:
            function(*arguments)
        else:
            self._executor.submit(function, *arguments)

    # -- in a thread --

    def _fetch(self, load: RemoteLoad, begin: float) -> None:
        source: Source = load.remote.source
        until = min(source.until, begin + self.timeout)
        fetched = False
        arrays: list[Any] | None = None
        cut: list[Piece] = []
        reason, size = "", 0
        try:
            if time.monotonic() < self._shunned.get(source.peer, 0.0):
                raise SplitError("the other worker has not answered lately")
            want, specs, cut = self._wanted(load, source)
            size = self._reserve(sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs), until)
            offer = self._ask(load, source, want, specs, until)
            found = self.worker.transports[want.transport].fetch(
                offer.address, offer.key, specs, max(0.001, until - time.monotonic())
            )
            fetched = True
            _verify(offer, specs, found)
            arrays = found
        except SplitTimeout as error:
            self._shunned[source.peer] = time.monotonic() + _SHUNNED
            reason = str(error)
        except (SplitError, TransportError) as error:
            reason = str(error)
        except Exception as error:
            # Whatever it is, the request must not wait for ever.
            log.exception("fetching state %s failed", source.ticket.id)
            reason = f"{type(error).__name__}: {error}"
        self._arrivals.put(_Arrival(load, arrays, cut, reason, time.monotonic() - begin, size))
        _release(source, fetched)

    def _reserve(self, size: int, until: float) -> int:
        """Waits until so many bytes may arrive."""
        with self._room:
            if not self._room.wait_for(
                lambda: not self._arriving or self._arriving + size <= self._max_arriving,
                max(0.0, until - time.monotonic()),
            ):
                raise SplitError(f"too many bytes were on their way for {size:,} more")
            self._arriving += size
        return size

    def _wanted(self, load: RemoteLoad, source: Source) -> tuple[StateRequest, list[jax.ShapeDtypeStruct], list[Piece]]:
        """What is missing here, and what that must look like when it comes."""
        worker, theirs = self.worker, source.peer.manifest
        ours = worker.manifest
        want = StateRequest(
            id=source.ticket.id,
            start=load.start if load.pages else load.position,
            unit=common_unit(theirs.page_size, ours.page_size),
            layers=ours.attention_layers + ours.draft_layers,
            transport=offer_kind(worker, source),
            manifest=theirs.digest,
            checksum=worker.verify,
        )
        specs, cut = point_specs(worker, want, load.position, theirs.ssm_dtype)
        return want, specs, cut

    def _ask(
        self, load: RemoteLoad, source: Source, want: StateRequest, specs: list[jax.ShapeDtypeStruct], until: float
    ) -> Offer:
        """What the other worker offers of it."""
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
            raise SplitError(f"state {offer.id} is that after {offer.position} tokens, not {load.position}")
        if [(tuple(shape), dtype) for shape, dtype in offer.shapes] != shapes_of(specs):
            raise SplitError(f"state {offer.id} is offered in other shapes than were expected")
        return offer

    # -- in the engine's thread --

    def _take(self, loop: StepLoop, arrival: _Arrival) -> None:
        load, arrays = arrival.load, arrival.arrays
        if not load.valid:
            self.stats.late += 1
            return
        if arrays is None:
            self.stats.failed += 1
            reason = arrival.error
            request = load.request
            if self.policy == "fail" and self._fail is not None and not load.remote.source.ticket.shared:
                self._fail(request.request_id, f"the prompt's state could not be fetched: {reason}")
            else:
                log.warning("request %s computes its prompt here: %s", request.request_id, reason)
                loop.scheduler.lost(load)
            return
        programs, page_size = self.worker.programs, self.worker.manifest.page_size
        count = len(arrays) - len(arrival.pieces)
        state = dict(zip(self.worker.state, arrays[:count], strict=True))
        loop.replace_store(lambda store: programs.write_state(store, load.slot, state, load.position))
        for piece, array in zip(arrival.pieces, arrays[count:], strict=True):
            # Pages before `start` were found here and are others' too; behind the last one there is nothing to keep.
            first = (piece.start - load.start) // page_size
            table = [
                load.pages[at] if 0 <= at < len(load.pages) else 0
                for at in range(first, first + piece.tokens // page_size)
            ]
            loop.replace_store(partial(programs.write_piece, pages=table, piece=array))
        self.stats.arrived += 1
        self.stats.fetch_seconds += arrival.seconds
        received = sum(array.nbytes for array in arrays)
        self.stats.received_bytes += received
        loop.scheduler.prices.fetched(PEER, received, arrival.seconds)
        self.stats.pages += len(load.pages)
        self.stats.pages_spared += load.start // page_size if page_size else 0
        loop.scheduler.arrived(load)


def _release(source: Source, wanted: bool) -> None:
    source.peer.release(source.ticket.id, wanted=wanted)


def offer_kind(worker: Worker, source: Source) -> str:
    """The transport to fetch with: the first of ours that the other worker has too."""
    theirs = source.peer.manifest.transports
    return next(name for name in worker.manifest.transports if name in theirs)


def _verify(offer: Offer, specs: Sequence[Any], arrays: Sequence[Any]) -> None:
    """Whether what has come is what was agreed on; nothing else is ever written."""
    if shapes_of(arrays) != shapes_of(specs):
        raise SplitError(f"state {offer.id} came in other shapes than were agreed on")
    if offer.checksums is not None and checksums(arrays) != offer.checksums:
        raise SplitError(f"state {offer.id} came damaged: its checksums differ")
