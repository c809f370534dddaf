"""States from and for other workers: the scheduler reserves, awaits, holds and releases them.

States from this worker's own tiers (`serving.core.tiers`) take the same path as states from other workers.

Decode side. A request whose prompt another worker has computed takes a row id, a slot and pages like any other request,
and then waits; its `load` describes the state to fetch. It counts as running for row ids, pools and preemption, but no
step has a row of it. The state is published, and the request planned, only after `arrived`. After a failure (`lost`,
preemption, a lost store) it is an ordinary request again, which computes its prompt here.

Prefill side. `hold` keeps the slot and the pages of a prompt's end until `release_hold`, even if the request ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.cache.pools import PagePool, SlotPool
from serving.core.cache.prefix_tree import CheckpointKind, Match
from serving.core.planning.state import SchedulerState
from serving.core.reasons import WaitReason
from serving.core.requests.request import PlannedRow, RemoteLoad, RemoteState, Request, ResultDisposition, Status


@dataclass(slots=True, eq=False)
class StateLease:
    """A slot and pages that do not change until they are released or the store is lost."""

    slot: int
    pages: list[int]
    position: int
    slots_of: SlotPool
    pages_of: PagePool | None


class RemoteStates(SchedulerState):
    """The scheduler's methods for states from and for other workers."""

    def pop_unneeded_remotes(self) -> list[RemoteState]:
        """Returns the remote states that requests have stopped needing since the last call."""
        unneeded, self.unneeded_remotes = self.unneeded_remotes, []
        return unneeded

    def arrived(self, load: RemoteLoad) -> None:
        """Called when the program that writes a load into its slot and pages has been dispatched.

        The next step continues from the loaded state. Full pages are published now. The state is also published, if it
        should be kept and the row can have another slot to write.
        """
        assert load.valid, "the request no longer waits for this"
        request, position = load.request, load.position
        progress, index = request.progress, self.index
        request.transfer.load = request.transfer.remote = None
        progress.set_up_due = True
        progress.num_computed = position
        if not request.lookup.final:
            request.lookup.num_cached_tokens = load.remote.cached_tokens
            request.lookup.miss_reason = None
        progress.stops = self.policy.stops(request.prompt_len, position, position, request.marks)
        if index is not None and progress.pages.publishes_at(position):
            index.publish_pages(progress.content, position)
        kind = None
        if load.remote.held is not None:
            kind = load.remote.held.unit.kind
        elif position == request.prompt_len:
            kind = CheckpointKind.PROMPT_END
        elif position % self.config.state_block_size == 0:
            kind = CheckpointKind.BOUNDARY
        progress.state.arrived(load.slot, progress.content, position, kind)
        if index is not None and request.marks:
            index.keep(request.marks, request.client, index.state_at(progress.content, position))

    def lost(self, load: RemoteLoad) -> None:
        """Returns a request whose load failed to its old place in the queue. It computes its prompt here."""
        if load.valid:
            self.requeue(load.request)

    def hold(self, row: PlannedRow) -> StateLease:
        """Publishes the state S(n) from which a dispatched row continues, and the pages of its n tokens."""
        request, cache = row.request, self.cache
        assert request.status is Status.RUNNING
        progress = request.progress
        slot = progress.state.hand_off(row.access)
        return StateLease(slot, progress.pages.hand_off(row.end), row.end, cache.slots, cache.pages)

    def hold_cached(self, tokens: Sequence[int], salt: str | None, adapter: str | None = None) -> StateLease | None:
        """Leases the deepest state of these tokens on the device, and the pages that it needs; None without one."""
        index, cache = self.index, self.cache
        match = index.find(tokens, cache.scope(salt, adapter)) if index is not None else None
        if index is None or match is None or match.entry is None:
            return None
        entry, pages = match.entry, list[int]()
        cache.slots.retain(entry.slot)
        if cache.pages is not None:
            pages = [node.page for node in match.path[: entry.position // index.unit]]
            pages += [entry.page] if entry.page else []
            for page in pages:
                cache.pages.retain(page)
        index.touch(entry)
        return StateLease(entry.slot, pages, entry.position, cache.slots, cache.pages)

    def hold_is_valid(self, held: StateLease) -> bool:
        """Returns whether the store of the hold still exists."""
        return held.slots_of is self.cache.slots

    def release_hold(self, held: StateLease) -> None:
        """Releases it, once."""
        if self.hold_is_valid(held):
            held.slots_of.release(held.slot)
            if held.pages_of is not None:
                for page in reversed(held.pages):
                    held.pages_of.release(page)


def remote_is_unneeded(request: Request, match: Match | None) -> bool:
    """Returns whether the cache already has everything that the other worker could send."""
    remote = request.transfer.remote
    return remote is not None and match is not None and match.position >= remote.position


def reserve(scheduler: SchedulerState, request: Request, match: Match | None) -> WaitReason | None:
    """Admits a request, which then waits for its state. Without room, it keeps nothing and returns the reason.

    All matching pages are referenced, even beyond the deepest cached state, because a page depends only on its tokens.
    The page of the next token is also reserved, so that the first step after the arrival needs no page.
    """
    remote, progress, config = request.transfer.remote, request.progress, scheduler.config
    pages, pool = progress.pages, scheduler.cache.pages
    assert remote is not None
    if pool is not None:
        pages.resume_from(match.path[: remote.position // config.page_size] if match is not None else [])
        reach = scheduler.reach(request, max(len(request.tokens), remote.position + 1))
        running = len(scheduler.queues.running)
        if (running and pages.missing(reach) + running > pool.available) or not pages.reserve(reach):
            scheduler.release_all(request, ResultDisposition.DROPPED)
            request.queueing.retry_above = pool.available
            return WaitReason.MEMORY
    slot = progress.state.lease()
    if not slot:
        scheduler.release_all(request, ResultDisposition.DROPPED)
        return WaitReason.SLOTS
    progress.row_id = scheduler.queues.free_row_ids.pop()
    first, end = pages.num_published, pages.pages_for(remote.position)
    load = RemoteLoad(request, remote, first * config.page_size, slot, pages.table[first:end])
    request.transfer.load = load
    scheduler.queues.admitted(request)
    scheduler.loads.append(load)
    return None
