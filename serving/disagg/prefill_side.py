"""The prefill worker's side: keeps the states of computed prompts until they are fetched, or nobody will.

A state is first *held*: its slot and pages stay in the store, shared with the cache. When a decode worker says what it
lacks, exactly that is copied out, the hold is let go, and the copy waits with the transport. Holds and copies are
counted and capped, and each has a lease: when it runs out, the copy is drained. So a decode worker that dies leaves
nothing behind.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.core import Hold, StepPlan
from serving.disagg.point import common_unit
from serving.disagg.wire import Offer, SplitError, Want
from serving.disagg.worker import Worker, checksums, point_specs, shapes_of
from serving.engine.loop import StepLoop

log = logging.getLogger(__name__)

_PATIENCE = 0.001


class TooMany(SplitError):
    """As many states are kept as may be: try another worker, or later."""


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
    """Nobody asked in time."""
    sent_bytes: int = 0
    """In all."""
    lost: int = 0
    """Went with the store."""


@dataclass(eq=False)
class Export:
    """The state of one prompt, from before it is computed until it is gone. Carried by the request as `export`."""

    id: str
    deadline: float = math.inf
    """The lease begins when there is a state; before, whoever waits for it calls `release` if it is given up."""
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
        max_kept: states that are kept at once, at most.
        clock: seconds.
    """

    def __init__(
        self, worker: Worker, *, lease: float = 30.0, max_kept: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.worker, self.lease, self.max_kept = worker, lease, max_kept
        self.stats = PrefillStats()
        self._clock = clock
        self._kept: dict[str, Export] = {}
        worker.loop.neighbour = self

    # -- of the loop --

    @property
    def busy(self) -> bool:
        """Never: leases run out by the clock, whoever calls `sweep`."""
        return False

    def exchange(self, loop: StepLoop) -> None:
        """Leases are looked at whenever a step is planned."""
        if self._kept:
            self.sweep()
            if not loop.in_flight and loop.scheduler.running:
                time.sleep(_PATIENCE)  # what is held may be what a step waits for: there is no hurry

    def dispatched(self, loop: StepLoop, plan: StepPlan) -> None:
        """Hold the states of prompts that end in this step."""
        for row in plan.rows:
            export: Export | None = row.request.export
            if export is None or export.done or not (row.sample and row.catching_up):
                continue
            if row.length + row.num_tokens != row.request.prompt_len:
                continue
            if export.hold is None:
                self.stats.held += 1
            elif loop.scheduler.hold_is_valid(export.hold):
                continue  # preempted after its prompt's end: what is held stays right
            export.hold = loop.scheduler.hold(row)
            export.deadline = self._clock() + self.lease

    # -- of the worker's endpoints --

    def begin(self) -> Export:
        """A place for a state that is about to be computed.

        Raises:
            TooMany: all places are taken.
        """
        self.sweep()
        if len(self._kept) >= self.max_kept:
            raise TooMany(f"{len(self._kept)} states wait to be fetched: no more are kept")
        export = Export(secrets.token_hex(8))
        self._kept[export.id] = export
        self.stats.begun += 1
        return export

    def offer(self, want: Want) -> Offer:
        """Copy what a decode worker lacks, and let its transport fetch it.

        Raises:
            SplitError: the state is gone, or cannot be had that way.
        """
        self.sweep()
        worker, export = self.worker, self._kept.get(want.id)
        if export is None or export.hold is None:
            raise SplitError(f"there is no state {want.id} (any more)")
        transport = worker.transports.get(want.transport)
        if transport is None:
            raise SplitError(f"transport {want.transport!r} is not to be had: {', '.join(worker.transports)} are")
        if want.manifest != worker.manifest.digest:
            raise SplitError("this is not the worker that shook hands: it has been started anew with other settings")
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
        export.deadline = self._clock() + self.lease
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
        """Let go of what nobody has asked for in time; returns how many there were."""
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
