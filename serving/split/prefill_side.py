"""The prefill worker's side: keeps the states of computed prompts until they are fetched or their leases expire.

A state is first *held*: its slot and pages stay in the store, shared with the cache. When a decode worker reports what
it lacks, exactly that is copied out, the hold is released, and the copy waits with the transport. Holds are limited in
number, copies in bytes. Each has a lease, which starts before the state is computed. A waiting worker renews the lease,
up to a limit; when the lease expires, the copy is drained. So a worker that disconnects leaves nothing behind.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serving.core import Hold, StepPlan
from serving.engine.loop import StepLoop
from serving.points.point import common_unit
from serving.split.wire import Offer, ShareRequest, SplitError, StateRequest, Ticket
from serving.split.worker import Worker, checksums, point_specs, shapes_of

log = logging.getLogger(__name__)

_PATIENCE = 0.001


class TooMany(SplitError):
    """As many states are kept, or bytes copied, as may be: try another worker, or later."""


@dataclass
class PrefillStats:
    """What has become of the states that this worker has computed for others."""

    begun: int = 0
    held: int = 0
    """Now: in the store."""
    copies: int = 0
    """Now: with the transport."""
    copied_bytes: int = 0
    """Now."""
    fetched: int = 0
    released: int = 0
    """Not wanted in the end."""
    expired: int = 0
    """No worker fetched it in time."""
    sent_bytes: int = 0
    """In all."""
    lost: int = 0
    """Went with the store."""


@dataclass(eq=False)
class Export:
    """The state of one prompt, from before it is computed until it is gone. Carried by the request as `export`."""

    id: str
    deadline: float
    """When the lease runs out, unless it is renewed."""
    last_deadline: float
    """The latest time to which the lease can be renewed."""
    hold: Hold | None = None
    key: int = 0
    transport: str = ""
    bytes: int = 0
    done: bool = False
    """Gone: nothing is kept for it any more."""


class PrefillSide:
    """Belongs to one engine; every method is called on the engine's thread.

    Args:
        worker: the engine and what it sends with.
        lease: seconds for which a state is kept, from each time that something was heard of it.
        max_lease: seconds for which a state is kept, whatever is heard of it.
        max_kept: states that are kept at once, at most.
        max_copied_bytes: of copies that wait to be fetched, at most. One copy may always be made.
        clock: seconds.
        computes: prompts for others, too; otherwise it only shares what it has (`share`).
    """

    def __init__(
        self,
        worker: Worker,
        *,
        lease: float = 30.0,
        max_lease: float = 600.0,
        max_kept: int = 64,
        max_copied_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
        computes: bool = True,
    ) -> None:
        self.worker, self.lease, self.max_lease = worker, lease, max_lease
        self.max_kept, self.max_copied_bytes = max_kept, max_copied_bytes
        self.stats = PrefillStats()
        self._clock = clock
        self._kept: dict[str, Export] = {}
        if computes:
            worker.loop.connect(self)

    # -- of the loop --

    @property
    def busy(self) -> bool:
        """Always False: leases expire by the clock, and every caller of `sweep` removes them."""
        return False

    def find(self, prompt: Sequence[int]) -> None:
        """Never: this side computes prompts itself."""

    def exchange(self, loop: StepLoop) -> None:
        """Leases are looked at whenever a step is planned."""
        if self._kept:
            self.sweep()
            if not loop.in_flight and loop.scheduler.running:
                time.sleep(_PATIENCE)  # what is held may be what a step waits for: there is no hurry

    def dispatched(self, loop: StepLoop, plan: StepPlan) -> None:
        """Hold the states of prompts that end in this step."""
        for row in plan.rows:
            export: Export | None = row.request.transfer.export
            if export is None or export.done or not (row.sample and row.is_prefill):
                continue
            if row.end != row.request.prompt_len:
                continue
            if export.hold is None:
                self.stats.held += 1
            elif loop.scheduler.hold_is_valid(export.hold):
                continue  # preempted after its prompt's end: what is held stays right
            export.hold = loop.scheduler.hold(row)
            self._heard_of(export)

    # -- of the worker's endpoints --

    def begin(self, id: str | None = None) -> Export:
        """A place for a state that is about to be computed. Its lease runs: see `renew`.

        `id` is chosen by the caller and unguessable for others, so the caller can release it even before this call.

        Raises:
            TooMany: all places are taken.
        """
        self.sweep()
        if len(self._kept) >= self.max_kept:
            raise TooMany(f"{len(self._kept)} states wait to be fetched: no more are kept")
        now = self._clock()
        export = Export(id or secrets.token_hex(16), now + self.lease, now + self.max_lease)
        self._kept[export.id] = export
        self.stats.begun += 1
        return export

    def share(self, asked: ShareRequest, *, url: str) -> Ticket:
        """Hold the deepest state of a prompt that the device has. It stays findable here, too.

        Raises:
            TooMany: all places are taken.
            SplitError: there is none so deep, or none of the weights that the manifest is of.
        """
        scheduler = self.worker.scheduler
        if scheduler.weights_replaced:
            raise SplitError("the weights have been replaced")
        export = self.begin()
        export.hold = hold = scheduler.hold_cached(asked.tokens, asked.salt)
        if hold is not None:
            self.stats.held += 1
        if hold is None or hold.position <= asked.beyond:
            self.release(export.id, wanted=False)
            raise SplitError("there is no state so deep (any more)")
        return Ticket(
            id=export.id,
            worker=url,
            handoff="full",
            prompt_token_ids=asked.tokens,
            position=hold.position,
            cached_tokens=hold.position,
            lease=self.lease,
            shared=True,
            manifest=self.worker.manifest.digest,
        )

    def renew(self, ids: Iterable[str]) -> None:
        """Renew the leases of these states: a worker still waits for them, or for their computation."""
        for id in ids:
            export = self._kept.get(id)
            if export is not None:
                self._heard_of(export)

    def offer(self, want: StateRequest) -> Offer:
        """Copy what a decode worker lacks, and let its transport fetch it.

        Raises:
            TooMany: other copies wait to be fetched, and there is no room for one more; the state stays as it is.
            SplitError: the state is gone, or cannot be had that way.
        """
        worker, export = self.worker, self._kept.get(want.id)
        if export is None or export.hold is None:
            raise SplitError(f"there is no state {want.id} (any more)")
        transport = worker.transports.get(want.transport)
        if transport is None:
            raise SplitError(f"transport {want.transport!r} is not available here: {', '.join(worker.transports)} are")
        if want.manifest != worker.manifest.digest:
            raise SplitError("the worker was restarted with different settings")
        store, hold = worker.loop.store, export.hold
        if store is None or not worker.scheduler.hold_is_valid(hold):
            self.stats.lost += 1
            self.release(want.id, wanted=False)
            raise SplitError(f"state {want.id} was lost with the store")
        if store.kv and want.unit % common_unit(store.page_size, 1):
            raise SplitError(f"units of {want.unit} tokens do not hold whole pages of {store.page_size}")
        if want.layers > len(store.kv):
            raise SplitError(f"{want.layers} layers of keys and values are wanted, {len(store.kv)} are kept")
        specs, cut = point_specs(worker, want, hold.position, worker.manifest.ssm_dtype)
        size = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        if self.stats.copied_bytes and self.stats.copied_bytes + size > self.max_copied_bytes:
            self._heard_of(export)
            raise TooMany(f"{self.stats.copied_bytes:,} bytes wait to be fetched: {size:,} more are too many")
        state = worker.programs.read_state(store, hold.slot)
        arrays = [state[name] for name in worker.state]
        for piece in cut:
            count = piece.tokens // store.page_size
            at = piece.start // store.page_size
            pages = hold.pages[at : at + count]
            pages = pages + [0] * (count - len(pages))
            arrays.append(worker.programs.read_piece(store, pages, hold.position - piece.start, want.layers))
        export.key, export.transport = secrets.randbits(62), want.transport
        export.bytes = sum(array.nbytes for array in arrays)
        sums = checksums(arrays) if want.checksum else None
        transport.offer(export.key, arrays)
        self._let_go(export)
        self._heard_of(export)
        self.stats.copies += 1
        self.stats.copied_bytes += export.bytes
        self.stats.sent_bytes += export.bytes
        return Offer(
            id=want.id,
            key=export.key,
            address=transport.address,
            position=hold.position,
            shapes=shapes_of(specs),
            checksums=sums,
        )

    def release(self, id: str, *, wanted: bool) -> None:
        """A state has been fetched (`wanted`), or will not be. Nothing happens if it is gone."""
        export = self._kept.pop(id, None)
        if export is None:
            return
        if wanted:
            self.stats.fetched += 1
        else:
            self.stats.released += 1
        self._drop(export, taken=wanted)

    def sweep(self) -> int:
        """Release states whose leases have expired; returns their number."""
        now = self._clock()
        late = [export for export in self._kept.values() if now > export.deadline]
        for export in late:
            del self._kept[export.id]
            self.stats.expired += 1
            log.warning("state %s was not fetched within %g s: dropped", export.id, self.lease)
            self._drop(export)
        return len(late)

    @property
    def kept(self) -> int:
        """States that are being computed, held or copied."""
        return len(self._kept)

    def _heard_of(self, export: Export) -> None:
        export.deadline = min(self._clock() + self.lease, export.last_deadline)

    def _drop(self, export: Export, *, taken: bool = False) -> None:
        self._let_go(export)
        export.done = True
        if export.key:
            self.worker.transports[export.transport].drain(export.key, taken=taken)
            self.stats.copies -= 1
            self.stats.copied_bytes -= export.bytes
            export.key = 0

    def _let_go(self, export: Export) -> None:
        if export.hold is not None:
            self.worker.scheduler.release_hold(export.hold)
            self.stats.held -= 1
            export.hold = None
