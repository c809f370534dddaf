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
from serving.core.planning.host_state import HostState
from serving.core.requests.request import PlannedRow, RemoteLoad, Request, ResultDisposition, Status


@dataclass(slots=True, eq=False)
class StateLease:
    """A slot and pages that do not change until they are released or the store is lost."""

    slot: int
    pages: list[int]
    position: int
    slots_of: SlotPool
    pages_of: PagePool | None


def remote_is_unneeded(request: Request, match: Match | None) -> bool:
    """Returns whether the cache already has everything that the other worker could send."""
    remote = request.transfer.remote
    return remote is not None and match is not None and match.position >= remote.position


def reserve(host: HostState, request: Request, match: Match | None) -> bool:
    """Admits a request, which then waits for its state. Returns False, and keeps nothing, if there is no room for it.

    All matching pages are referenced, even beyond the deepest cached state, because a page depends only on its tokens.
    The page of the next token is also reserved, so that the first step after the arrival needs no page.
    """
    remote, progress, config = request.transfer.remote, request.progress, host.config
    pages, pool = progress.pages, host.cache.pages
    assert remote is not None
    if pool is not None:
        pages.resume_from(match.path[: remote.position // config.page_size] if match is not None else [])
        reach = host.reach(request, max(len(request.tokens), remote.position + 1))
        if host.queues.running and pages.missing(reach) + len(host.queues.running) > pool.available:
            host.release_all(request, ResultDisposition.DROPPED)
            request.queueing.retry_above = pool.available
            return False
        if not pages.reserve(reach):
            host.release_all(request, ResultDisposition.DROPPED)
            return False
    slot = progress.state.lease()
    if not slot:
        host.release_all(request, ResultDisposition.DROPPED)
        return False
    progress.row_id = host.queues.free_row_ids.pop()
    first, end = pages.num_published, pages.pages_for(remote.position)
    load = RemoteLoad(request, remote, first * config.page_size, slot, pages.table[first:end])
    request.transfer.load = load
    host.queues.admitted(request)
    host.loads.append(load)
    return True


def arrived(host: HostState, load: RemoteLoad) -> None:
    """Called when the program that writes a load into its slot and pages has been dispatched.

    The next step continues from the loaded state. Full pages are published now. The state is also published, if it
    should be kept and the row can have another slot to write.
    """
    assert load.valid, "the request no longer waits for this"
    request, position = load.request, load.position
    progress, index = request.progress, host.cache.index
    request.transfer.load = request.transfer.remote = None
    progress.set_up_due = True
    progress.num_computed = position
    if not request.lookup.final:
        request.lookup.num_cached_tokens = load.remote.cached_tokens
        request.lookup.miss_reason = None
    progress.stops = host.policy.stops(request.prompt_len, position, position)
    if index is not None and progress.pages.publishes_at(position):
        index.publish_pages(progress.content, position)
    kind = None
    if load.remote.held is not None:
        kind = load.remote.held.unit.kind
    elif position == request.prompt_len:
        kind = CheckpointKind.PROMPT_END
    elif position % host.config.state_block_size == 0:
        kind = CheckpointKind.BOUNDARY
    progress.state.arrived(load.slot, progress.content, position, kind)


def lost(host: HostState, load: RemoteLoad) -> None:
    """Returns a request whose load failed to its old place in the queue. It computes its prompt here."""
    if load.valid:
        host.requeue(load.request)


def hold(host: HostState, row: PlannedRow) -> StateLease:
    """Publishes the state S(n) from which a dispatched row continues, and the pages of its n tokens."""
    request, cache = row.request, host.cache
    assert request.status is Status.RUNNING
    progress = request.progress
    slot = progress.state.hand_off(row.access)
    return StateLease(slot, progress.pages.hand_off(row.end), row.end, cache.slots, cache.pages)


def hold_cached(host: HostState, tokens: Sequence[int], salt: str | None, adapter: str | None) -> StateLease | None:
    """Leases the deepest state of these tokens on the device, and the pages that it needs. Returns None without one."""
    index, cache = host.cache.index, host.cache
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


def hold_is_valid(host: HostState, held: StateLease) -> bool:
    """Returns whether the store of the hold still exists."""
    return held.slots_of is host.cache.slots


def release_hold(host: HostState, held: StateLease) -> None:
    """Releases it, once."""
    if hold_is_valid(host, held):
        held.slots_of.release(held.slot)
        if held.pages_of is not None:
            for page in reversed(held.pages):
                held.pages_of.release(page)
