"""Everything the scheduler knows, and the moves by which rows get and give up slots, pages and seats."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from serving.core.config import SchedulerConfig
from serving.core.drafts import DraftPolicy
from serving.core.plan import DecodeRow, Fate, Row, StepPlan
from serving.core.policy import CachePolicy
from serving.core.pools import PagePool, SlotPool
from serving.core.prefix_index import PrefixIndex
from serving.core.request import Request, RowState, Status
from serving.core.stats import Stats

if TYPE_CHECKING:
    from serving.core.remote import Load, RemoteState

_ORDER = attrgetter("order")


class HostState:
    """Queues, pools and the steps under way."""

    def __init__(self, config: SchedulerConfig, policy: CachePolicy, drafts: DraftPolicy) -> None:
        self.config = config
        self.policy = policy
        self.drafts = drafts
        self.stats = Stats()
        self.requests: dict[str, Request] = {}
        """All that have not finished."""
        self.waiting: list[Request] = []
        """By priority, then arrival."""
        self.running: list[Request] = []
        """By priority, then arrival: the last one is preempted first."""
        self.pending: StepPlan | None = None
        """Planned, or being planned, and not yet dispatched."""
        self.unsettled: deque[StepPlan] = deque()
        """Dispatched, oldest first."""
        self.loads: list[Load] = []
        """Begun since the engine last asked."""
        self.spared: list[RemoteState] = []
        """No longer wanted by their requests, since the engine last asked."""
        self.width = 1 + config.num_speculative_tokens
        """Slots that a row owns."""
        self.slots: SlotPool
        self.pages: PagePool | None
        self.index: PrefixIndex | None
        self.free_seats: list[int]
        self.new_pools()

    def new_pools(self) -> None:
        """Empty pools, an empty index, all seats free."""
        config = self.config
        self.slots = SlotPool(config.num_slots)
        self.pages = PagePool(config.num_pages) if config.num_pages else None
        unit = config.page_size if config.num_pages else config.state_block_size
        self.index = PrefixIndex(self.slots, self.pages, self.policy, unit, self.stats) if config.caching else None
        self.free_seats = list(range(config.seats, 0, -1))

    # -- queues --

    def enqueue(self, request: Request) -> None:
        """To the waiting ones, at its place."""
        request.status = Status.WAITING
        insort(self.waiting, request, key=_ORDER)

    def enter(self, request: Request) -> None:
        """To the running ones, at its place."""
        request.status = Status.RUNNING
        insort(self.running, request, key=_ORDER)

    def leave(self, request: Request) -> None:
        """Out of the queue that it is in."""
        queue = self.running if request.status is Status.RUNNING else self.waiting
        del queue[bisect_left(queue, request.order, key=_ORDER)]

    # -- pages --

    def pages_for(self, tokens: int) -> int:
        """Pages that many tokens fill."""
        return -(-tokens // self.config.page_size)

    def reach(self, request: Request, end: int) -> int:
        """How many tokens must have a page for a step that feeds tokens up to `end`.

        The last token that a sequence can have is never fed, so whatever optimism would put there needs no page.
        """
        return min(end + self.config.num_lookahead_tokens, request.max_total - 1)

    def return_surplus(self, request: Request) -> None:
        """Give back the pages beyond what the unsettled steps can reach."""
        if self.pages is None:
            return
        end = request.num_computed
        for row in request.flights:
            end += row.num_tokens
        held = request.pages
        keep = max(self.pages_for(self.reach(request, end)), request.num_published, request.shared_page + 1)
        while len(held) > keep:
            self.pages.release(held.pop())

    # -- slots --

    def choose_slots(self, request: Request, count: int) -> list[int]:
        """Up to `count` slots that the request's next step may write; at least one, or the row has to wait.

        Not those in which an unsettled step may have left a multiple of B, unless nothing else is to be had: keeping
        a checkpoint is best effort, going on is not. All others may be written, the one that the step reads included,
        because a step reads before it writes.
        """
        own = request.state.own
        kept: Sequence[int] = request.flights[-1].boundary_slots if request.flights else ()
        if kept and len(own) >= count and not self.can_spare_slot():
            self.give_up_boundary(request.flights[-1])
            kept = ()
        usable = [slot for slot in own if slot not in kept] if kept else own[:count]
        while len(usable) < count:
            fresh = self.slots.take()
            if not fresh:
                break
            own.append(fresh)
            usable.append(fresh)
        if usable:
            return usable[:count]
        if kept:
            self.give_up_boundary(request.flights[-1])
            return own[:count]
        held = request.state.held
        if held and self.slots.refs[held] == 1:
            # Nobody else reads the published state that this row goes on from: it becomes the row's own again.
            self.unpublish_slot(held)
            request.state.held = 0
            own.append(held)
            return [held]
        return []

    def can_spare_slot(self, *, seating: int = 0) -> bool:
        """Whether a slot may go into a checkpoint: only if those who wait for a seat can have theirs all the same.

        `seating`: how many of the waiting ones (0 or 1) have theirs already.
        """
        return self.slots.available > min(len(self.free_seats), len(self.waiting) - seating)

    def give_up_boundary(self, row: Row) -> None:
        """The next step may write over what an unsettled decode row would have published."""
        assert isinstance(row, DecodeRow)
        row.boundary_slots = ()
        self.stats.boundaries_not_kept += 1

    def unpublish_slot(self, slot: int) -> None:
        """Make sure that a slot in use is not findable."""
        entry = self.slots.owners[slot]
        if entry is not None and self.index is not None:
            self.index.drop_state(entry)

    def trim_slots(self, request: Request) -> None:
        """Give back what a row owns beyond 1 + K slots, except where its next step may read."""
        own = request.state.own
        surplus = len(own) - self.width
        if surplus <= 0:
            return
        keep = {request.state.current}
        if request.flights:
            last = request.flights[-1]
            keep.update(writes(last))
            keep.update(last.boundary_slots)
        for slot in [slot for slot in own if slot not in keep][:surplus]:
            own.remove(slot)
            self.slots.release(slot)

    # -- letting go --

    def forsake(self, row: Row) -> None:
        """Drop what an undispatched row holds beside its request. The row itself may still be run: it is not changed.

        Nothing it writes is handed out before the next step is planned, and that one runs later.
        """
        if row.release_slot:
            self.slots.release(row.release_slot)
            row.release_slot = 0
        if row.page_copy is not None and self.pages is not None:
            self.pages.release(row.page_copy[0])
        for mark in row.marks:
            if mark.position != row.length + row.num_tokens:
                self.slots.release(mark.slot)
        row.marks = ()

    def undo(self, row: Row) -> None:
        """Make an undispatched row as if it had never been planned; its request goes on running."""
        request = row.request
        request.flights.remove(row)
        request.num_sampling_steps -= row.sample
        if row.release_slot:
            request.state.held = row.release_slot
            row.release_slot = 0
        if row.page_copy is not None and self.pages is not None:
            source, target = row.page_copy
            request.pages[row.shared_page] = source
            request.shared_page = row.shared_page
            self.pages.release(target)
        for mark in row.marks:
            if mark.position != row.length + row.num_tokens:
                self.slots.release(mark.slot)
        row.fate = Fate.DROPPED

    def release_all(self, request: Request, fate: Fate) -> None:
        """Free everything that a seated request has, or one about to be. Its unsettled rows keep `fate`."""
        for row in request.flights:
            row.fate = fate
        request.flights = []
        state = request.state
        for slot in state.own:
            self.slots.release(slot)
        if state.held:
            self.slots.release(state.held)
        if self.pages is not None:
            # Tails first, so that they are also evicted first.
            for page in reversed(request.pages):
                self.pages.release(page)
        if request.row_id:
            self.free_seats.append(request.row_id)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Make a request as if it had never run, but for its tokens."""
        request.state = RowState()
        # A new list: rows that are still to be run keep the old one as their page table.
        request.pages = []
        request.flights = []
        request.stops = []
        request.node = None
        request.row_id = request.num_computed = request.num_published = request.num_sampling_steps = 0
        request.shared_page = -1
        request.retry_above, request.retry_at = -1, 0
        request.seat_due = False
        if request.load is not None:
            self.spared.append(request.load.remote)
            request.load = request.remote = None

    def check(self, *, idle: bool = False) -> None:
        """Raise `AssertionError` unless every slot, page and seat is accounted for; `idle`: and none is in use."""
        self.slots.check(idle=idle)
        if self.pages is not None:
            self.pages.check(idle=idle)
        assert len(self.free_seats) + len(self.running) == self.config.seats, "seats leaked"
        assert len(self.requests) == len(self.running) + len(self.waiting), "requests leaked"


def writes(row: Row) -> Sequence[int]:
    """The slots that a row's sequence may go on from."""
    return row.write_slots if isinstance(row, DecodeRow) else row.tile_write_slots[-1:]
