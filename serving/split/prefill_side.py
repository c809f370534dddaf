"""The prefill worker's side: keeps the states of computed prompts until they are fetched or their leases expire.

A state is first *held*: its slot and pages stay in the store, shared with the cache. When a decode worker requests the
part that it does not have, that part is copied to the transport and the hold is released. Holds are limited in number,
copies in bytes. Each has a lease, which starts before the state is computed and is renewed up to a limit, so a worker
that disconnects leaks no memory.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.core.planning.plan import StepPlan
from serving.core.planning.state import StateLease
from serving.engine.requests.sampling_params import SamplingParams
from serving.split.settings import SplitSettings
from serving.split.wire import Handoff, Manifest, Offer, ShareRequest, SplitError, StateRequest, Ticket
from serving.split.worker import Worker, checksums, point_specs, shapes_of
from serving.state_transfer.programs import common_unit, num_bytes
from serving.state_transfer.source import Loop, StateSource

log = logging.getLogger(__name__)

_PATIENCE = 0.001

ONCE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Parameters of the request to this engine for a prompt that another worker continues. Its single token is discarded,
because the decode side samples its own."""


class TooMany(SplitError):
    """The limit of states or copied bytes is reached: try another worker, or later."""


@dataclass
class PrefillStats:
    """Counters of the states that this worker computed for others."""

    begun: int = 0
    held: int = 0  # currently held in the store
    copies: int = 0  # current copies in the transport
    copied_bytes: int = 0  # current size of these copies
    fetched: int = 0
    released: int = 0  # released without being fetched
    expired: int = 0  # not fetched before the lease expired
    sent_bytes: int = 0  # total size of all copies so far
    lost: int = 0  # lost with the store


@dataclass(eq=False)
class Export:
    """The state of one prompt, from before it is computed until it is dropped. The request has it as `export`."""

    id: str
    deadline: float  # end of the lease, unless it is renewed
    last_deadline: float  # the latest time to which the lease can be renewed
    hold: StateLease | None = None
    salt: str | None = None  # the salt of the request for which the state was computed
    adapter: str | None = None  # digest of this request's adapter
    key: int = 0
    transport: str = ""
    bytes: int = 0
    done: bool = False  # the state was dropped
    client: str | None = None  # the API key that asked for it, if the worker has several


class PrefillSide(StateSource):
    """Belongs to one engine; every method is called on the engine's thread. It offers states and fetches none.

    Args:
        worker: the engine, its manifest and its transports.
        settings: leases and limits; one copy that waits to be fetched is always allowed. With the role `decode`, the
            side computes no prompts for others, and only shares cached states (`share`).
        url: where other workers reach this one, for tickets.
    """

    def __init__(self, worker: Worker, settings: SplitSettings | None = None, url: str = "") -> None:
        self.worker, self.settings, self.url = worker, settings or SplitSettings.create(), url
        self.stats = PrefillStats()
        self._clock = time.monotonic
        self._kept: dict[str, Export] = {}
        if self.settings.role != "decode":
            worker.loop.sources.append(self)

    # -- called by the engine's loop --

    shared_with_workers = True

    def exchange(self, loop: Loop) -> None:
        """Removes expired leases before each step."""
        if self._kept:
            self.sweep()
            if not loop.in_flight and loop.scheduler.queues.running:
                time.sleep(_PATIENCE)  # the step may wait for held memory: do not spin

    def dispatched(self, loop: Loop, plan: StepPlan) -> None:
        """Holds the states of prompts that end in this step."""
        for row in plan.rows:
            export: Export | None = row.request.transfer.export
            if export is None or export.done or not (row.sample and row.is_prefill):
                continue
            if row.end != row.request.prompt_len:
                continue
            if export.hold is None:
                self.stats.held += 1
            elif loop.scheduler.hold_is_valid(export.hold):
                continue  # preempted after the end of its prompt: the held state is still valid
            export.hold = loop.scheduler.hold(row)
            export.salt, export.adapter = row.request.cache_salt, row.request.adapter
            self._extend_lease(export)

    # -- called by the worker's endpoints --

    def begin(self, id: str | None = None, client: str | None = None) -> Export:
        """Registers a state that is about to be computed. Its lease starts now: see `renew`. The caller chooses an
        unguessable `id`, so that it can release the state even before this call.

        Raises:
            TooMany: `max_kept` states are registered, or no more places are free than the client has.
        """
        self.sweep()
        own = 0 if client is None else sum(each.client == client for each in self._kept.values())
        if own >= self.settings.max_kept - len(self._kept):
            raise TooMany(f"transfer limit reached: {len(self._kept)} states pending (--max-kept)")
        now = self._clock()
        ends = now + self.settings.lease, now + self.settings.max_lease
        export = Export(id or secrets.token_hex(16), *ends, client=client)
        self._kept[export.id] = export
        self.stats.begun += 1
        return export

    def share(self, wanted: ShareRequest) -> Ticket:
        """Holds the deepest state of a prompt that the device has. It also stays in this worker's cache.

        Raises:
            TooMany: `max_kept` states are registered.
            SplitError: there is no state of the required depth, or the weights were replaced.
        """
        scheduler = self.worker.loop.scheduler
        if scheduler.cache.weights:
            raise SplitError("the weights have been replaced")
        export = self.begin()
        export.hold = hold = scheduler.hold_cached(wanted.tokens, wanted.salt, wanted.adapter)
        if hold is not None:
            self.stats.held += 1
        if hold is None or hold.position <= wanted.beyond:
            self.release(export.id, wanted=False)
            raise SplitError("no cached state for this prefix")
        export.salt, export.adapter = wanted.salt, wanted.adapter
        ticket = self.ticket(export, wanted.tokens, "full", cached_tokens=hold.position, shared=True)
        return ticket.model_copy(update={"position": hold.position})

    def ticket(self, export: Export | None, prompt: Sequence[int], handoff: Handoff, **fields: Any) -> Ticket:
        """Returns the ticket for the decode side, with further `fields`. Without a state (`export`), there is nothing
        to fetch."""
        export = export or Export("", 0.0, 0.0)
        return Ticket(
            id=export.id,
            worker=self.url,
            handoff=handoff,
            prompt_token_ids=list(prompt),
            position=len(fed_tokens(prompt, handoff)),
            lease=self.settings.lease,
            manifest=self.worker.manifest.digest,
            salt=export.salt,
            adapter=export.adapter,
            **fields,
        )

    def renew(self, ids: Sequence[str]) -> None:
        """Renews the leases of these states, because a worker still waits for them."""
        for id in self._kept.keys() & set(ids):
            self._extend_lease(self._kept[id])

    @property
    def manifest(self) -> Manifest:
        """The worker's manifest."""
        return self.worker.manifest

    def offer(self, want: StateRequest, seconds: float = math.inf) -> Offer:
        """Copies the part of a state that a decode worker does not have, for its transport to fetch. Takes no time of
        `seconds`.

        Raises:
            TooMany: pending copies leave no room for this one; the state stays held.
            SplitError: the state was dropped, or the request does not fit this worker.
        """
        worker, export = self.worker, self._kept.get(want.id)
        if export is None or export.hold is None:
            raise SplitError(f"state {want.id} does not exist or was dropped")
        transport = worker.transports.get(want.transport)
        if transport is None:
            raise SplitError(f"transport {want.transport!r} is not available; allowed: {', '.join(worker.transports)}")
        if want.manifest != worker.manifest.digest:
            raise SplitError("the worker was restarted with different settings")
        store, hold = worker.loop.store, export.hold
        if store is None or not worker.loop.scheduler.hold_is_valid(hold):
            self.stats.lost += 1
            self.release(want.id, wanted=False)
            raise SplitError(f"state {want.id} was lost with the store")
        if store.kv and want.unit % common_unit(store.page_size, 1):
            raise SplitError(f"unit {want.unit} is not a multiple of the page size {store.page_size}")
        if want.layers > len(store.kv):
            raise SplitError(f"{want.layers} layers of keys and values requested, only {len(store.kv)} stored")
        specs, cut = point_specs(worker, want, hold.position, worker.manifest.ssm_dtype)
        size = num_bytes(specs)
        if self.stats.copied_bytes and self.stats.copied_bytes + size > self.settings.max_transfer_bytes:
            self._extend_lease(export)
            raise TooMany(f"transfer buffer full ({self.stats.copied_bytes:,} bytes pending, {size:,} requested)")
        state = worker.programs.read_state(store, hold.slot)
        arrays = [state[name] for name in worker.state]
        for piece in cut:
            count = piece.tokens // store.page_size
            at = piece.start // store.page_size
            pages = (hold.pages[at : at + count] + [0] * count)[:count]
            arrays.append(worker.programs.read_piece(store, pages, hold.position - piece.start, want.layers))
        export.key, export.transport = secrets.randbits(62), want.transport
        export.bytes = sum(array.nbytes for array in arrays)
        sums = checksums(arrays) if want.checksum else None
        transport.offer(export.key, arrays)
        self._release_hold(export)
        self._extend_lease(export)
        self.stats.copies += 1
        self.stats.copied_bytes += export.bytes
        self.stats.sent_bytes += export.bytes
        return Offer(
            id=want.id, key=export.key, address=transport.address, position=hold.position, shapes=shapes_of(specs),
            checksums=sums,
        )  # fmt: skip

    def release(self, id: str, *, wanted: bool) -> None:
        """Drops a state that was fetched (`wanted`) or is not needed. Ignores unknown ids."""
        export = self._kept.pop(id, None)
        if export is None:
            return
        self.stats.fetched += wanted
        self.stats.released += not wanted
        self._drop(export, taken=wanted)

    def sweep(self) -> int:
        """Drops states with expired leases. Returns their number."""
        now = self._clock()
        late = [export for export in self._kept.values() if now > export.deadline]
        for export in late:
            del self._kept[export.id]
            self.stats.expired += 1
            log.warning("dropped state %s: not fetched within %g s", export.id, self.settings.lease)
            self._drop(export)
        return len(late)

    @property
    def kept(self) -> int:
        """Number of states that are being computed, held or copied."""
        return len(self._kept)

    def _extend_lease(self, export: Export) -> None:
        export.deadline = min(self._clock() + self.settings.lease, export.last_deadline)

    def _drop(self, export: Export, *, taken: bool = False) -> None:
        self._release_hold(export)
        export.done = True
        if export.key:
            self.worker.transports[export.transport].drain(export.key, taken=taken)
            self.stats.copies -= 1
            self.stats.copied_bytes -= export.bytes
            export.key = 0

    def _release_hold(self, export: Export) -> None:
        if export.hold is not None:
            self.worker.loop.scheduler.release_hold(export.hold)
            self.stats.held -= 1
            export.hold = None


def fed_tokens(prompt: Sequence[int], handoff: Handoff) -> list[int]:
    """Returns the tokens to compute; none for a prompt of one token with `recompute-last`, which omits the last token.
    It must do so before the prefix lookup, because a fully cached prompt has no token to omit afterwards."""
    return list(prompt[:-1] if handoff == "recompute-last" else prompt)


class Peer(Protocol):
    """A prefill worker for a decode worker: a `PrefillSide` in the same process, or a client of another one, which may
    be called from any thread. `offer` may block, and raises `SplitError` if there is no answer within `seconds`;
    `renew` and `release` never raise or block, because leases expire anyway."""

    @property
    def manifest(self) -> Manifest: ...

    def offer(self, want: StateRequest, seconds: float) -> Offer: ...

    def renew(self, ids: Sequence[str]) -> None: ...

    def release(self, id: str, *, wanted: bool) -> None: ...
