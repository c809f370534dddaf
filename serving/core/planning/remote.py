"""States that come from another worker (or go to one): what the scheduler reserves, awaits, holds and lets go.

What comes from a tier of this worker's own (`serving.core.tiers`) takes the same way as what another worker sends.

Decode side. A request whose prompt another worker has computed takes a row id, a slot and pages as any other does, and
then waits: its `load` says what has to arrive. It is running as far as row ids, pools and preemption are concerned,
and no step has a row of it. What arrives is published, and planned, from `arrived` on and not before. Whatever goes
wrong (`lost`, preemption, a lost store) makes it an ordinary request again, which computes its prompt here.

Prefill side. `hold` keeps the slot and the pages of a prompt's end, whatever becomes of the request, until
`release_hold`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.cache.pools import PagePool, SlotPool
from serving.core.cache.prefix_tree import CheckpointKind, Match
from serving.core.planning.host_state import HostState
from serving.core.requests.request import Fate, PlannedRow, RemoteLoad, Request, Status


@dataclass(slots=True, eq=False)
class Hold:
    """A slot and pages that stay as they are, until they are released or the store is lost."""

    slot: int
    pages: list[int]
    position: int
    slots_of: SlotPool
    pages_of: PagePool | None


def remote_is_unneeded(request: Request, match: Match | None) -> bool:
    """Whether the cache has all that the other worker could send."""
    remote = request.transfer.remote
    return remote is not None and match is not None and match.position >= remote.position


def reserve(host: HostState, request: Request, match: Match | None) -> bool:
    """Admit a request and let it wait for its state. False, with nothing kept, if there is no room for it.

    Pages are referenced as far as they match, perhaps deeper than any state: a page depends on its own tokens only.
    The page of the next token is reserved too, so that the first step after the arrival needs nothing.
    """
    remote, progress, config = request.transfer.remote, request.progress, host.config
    pages, pool = progress.pages, host.cache.pages
    assert remote is not None
    if pool is not None:
        pages.resume_from(match.path[: remote.position // config.page_size] if match is not None else [])
        reach = host.reach(request, max(len(request.tokens), remote.position + 1))
        if host.queues.running and pages.missing(reach) + len(host.queues.running) > pool.available:
            host.release_all(request, Fate.DROPPED)
            request.queueing.retry_above = pool.available
            return False
        if not pages.reserve(reach):
            host.release_all(request, Fate.DROPPED)
            return False
    slot = progress.state.lease()
    if not slot:
        host.release_all(request, Fate.DROPPED)
        return False
    progress.row_id = host.queues.free_row_ids.pop()
    first, end = pages.num_published, pages.pages_for(remote.position)
    load = RemoteLoad(request, remote, first * config.page_size, slot, pages.table[first:end])
    request.transfer.load = load
    host.queues.admitted(request)
    (host.loads if remote.held is None else host.fetches).append(load)
    return True


def arrived(host: HostState, load: RemoteLoad) -> None:
    """What a request waits for is in its slot and pages (that is, the program that writes it has been dispatched).

    The next step goes on from there. Full pages become findable now; so does the state, if it is one to keep and the
    row can have another slot to write.
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
    """It will not arrive: back to the queue, at the request's old place, to compute the prompt here."""
    if not load.valid:
        return
    request = load.request
    host.queues.leave(request)
    host.release_all(request, Fate.DROPPED)
    host.queues.enqueue(request)


def drop_remote(host: HostState, request: Request) -> None:
    """Release the remote state of a request that ends or no longer needs it."""
    transfer = request.transfer
    if transfer.remote is not None:
        host.let_go(transfer.remote)
        transfer.remote = transfer.load = None


def hold(host: HostState, row: PlannedRow) -> Hold:
    """Keep what a row that has just been dispatched goes on from: S(n), and the pages of its n tokens."""
    request, cache = row.request, host.cache
    assert request.status is Status.RUNNING
    progress = request.progress
    slot = progress.state.hand_off(row.access)
    return Hold(slot, progress.pages.hand_off(row.end), row.end, cache.slots, cache.pages)


def hold_cached(host: HostState, tokens: Sequence[int], salt: str | None) -> Hold | None:
    """Keep the deepest state of these tokens that the device has, and the pages that it needs; None if it has none."""
    index, cache = host.cache.index, host.cache
    match = index.find(tokens, cache.scope(salt)) if index is not None else None
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
    return Hold(entry.slot, pages, entry.position, cache.slots, cache.pages)


def hold_is_valid(host: HostState, held: Hold) -> bool:
    """Whether the store that it lies in is still there."""
    return held.slots_of is host.cache.slots


def release_hold(host: HostState, held: Hold) -> None:
    """Let go of it, once."""
    if hold_is_valid(host, held):
        held.slots_of.release(held.slot)
        if held.pages_of is not None:
            for page in reversed(held.pages):
                held.pages_of.release(page)
