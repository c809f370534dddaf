"""States that come from another worker (or go to one): what the scheduler reserves, awaits, holds and lets go.

Decode side. A request whose prompt another worker has computed takes a seat, a slot and pages as any other does, and
then waits: its `load` says what has to arrive. It is running as far as seats, pools and preemption are concerned, and
no step has a row of it. What arrives is published, and planned, from `arrived` on and not before. Whatever goes wrong
(`lost`, preemption, a lost store) makes it an ordinary request again, which computes its prompt here.

Prefill side. `hold` keeps the slot and the pages of a prompt's end, whatever becomes of the request, until
`release_hold`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.core.host_state import HostState, writes
from serving.core.plan import DecodeRow, Fate, PrefillRow
from serving.core.policy import Kind
from serving.core.pools import PagePool, SlotPool
from serving.core.prefix_tree import Match
from serving.core.request import Request, Status


@dataclass(slots=True, eq=False)
class RemoteState:
    """Says that another worker has S(position) of a request's tokens, and all keys and values up to there."""

    position: int
    """All prompt tokens (handoff `full`) or all but the last (`recompute-last`)."""
    source: Any = None
    """For the engine: where it is to be had."""
    cached_tokens: int = 0
    """Prompt tokens that the other worker did not have to compute either."""


@dataclass(slots=True, eq=False)
class Load:
    """What a seated request waits for: one state, and keys and values of the tokens [start, position)."""

    request: Request
    remote: RemoteState
    start: int
    """A multiple of the page size: the pages up to here were found in the cache."""
    slot: int
    pages: Sequence[int]
    """Where the tokens from `start` on go; empty where no page is missing, or there are none at all."""

    @property
    def position(self) -> int:
        """Tokens that the state has absorbed."""
        return self.remote.position

    @property
    def valid(self) -> bool:
        """Whether the request still waits for it. If not, its slot and pages may be somebody else's."""
        return self.request.load is self


@dataclass(slots=True, eq=False)
class Hold:
    """A slot and pages that stay as they are. Lost with the store: then `valid` turns false."""

    slot: int
    pages: list[int]
    position: int
    slots_of: SlotPool
    pages_of: PagePool | None


def spares_remote(request: Request, match: Match | None) -> bool:
    """Whether the cache has all that the other worker could send."""
    return request.remote is not None and match is not None and match.position >= request.remote.position


def reserve(host: HostState, request: Request, match: Match | None) -> bool:
    """Seat a request and let it wait for its state. False, with nothing kept, if there is no room for it.

    Pages are referenced as far as they match, deeper than any state as may be: a page depends on its own tokens only.
    The page of the next token is reserved too, so that the first step after the arrival needs nothing.
    """
    remote, pages = request.remote, host.pages
    assert remote is not None
    if pages is not None:
        path = match.path[: remote.position // host.config.page_size] if match is not None else []
        for node in path:
            pages.retain(node.page)
            request.pages.append(node.page)
        request.num_published = len(path)
        request.node = path[-1] if path else None
        need = host.pages_for(host.reach(request, max(len(request.tokens), remote.position + 1)))
        if host.running and need - len(path) + len(host.running) > pages.available:
            host.release_all(request, Fate.DROPPED)
            request.retry_above = pages.available
            return False
        while len(request.pages) < need:
            page = pages.take()
            if not page:
                host.release_all(request, Fate.DROPPED)
                return False
            request.pages.append(page)
    slot = host.slots.take()
    if not slot:
        host.release_all(request, Fate.DROPPED)
        return False
    request.state.own.append(slot)
    request.row_id = host.free_seats.pop()
    start = request.num_published * host.config.page_size
    count = host.pages_for(remote.position) if pages is not None else 0
    request.load = Load(request, remote, start, slot, request.pages[request.num_published : count])
    host.leave(request)
    host.enter(request)
    host.loads.append(request.load)
    return True


def arrived(host: HostState, load: Load) -> None:
    """What a request waits for is in its slot and pages (that is, the program that writes it has been dispatched).

    The next step goes on from there. Full pages become findable now; so does the state, if it is one to keep and the
    row can have another slot to write.
    """
    assert load.valid, "nobody waits for this any more"
    request, position = load.request, load.position
    request.load = request.remote = None
    request.seat_due = True
    request.num_computed = position
    request.state.current = load.slot
    if not request.counted:
        request.num_cached_tokens = load.remote.cached_tokens
    index = host.index
    request.stops = host.policy.stops(request, position, position)
    if index is None:
        return
    if host.pages is not None and position // host.config.page_size > request.num_published:
        index.publish_pages(request, position)
    kind = Kind.PROMPT_END if position == request.prompt_len else Kind.BOUNDARY
    if kind == Kind.BOUNDARY and position % host.config.state_block_size:
        return
    if not host.can_spare_slot():
        host.stats.boundaries_not_kept += 1
        return
    spare = host.slots.take()
    if index.publish_state(request, position, load.slot, kind):
        request.state.own = [spare]
        request.state.held = load.slot
        if host.pages is not None and position % host.config.page_size:
            request.shared_page = position // host.config.page_size
    else:
        host.slots.release(spare)


def lost(host: HostState, load: Load) -> None:
    """It will not arrive: back to the queue, at the request's old place, to compute the prompt here."""
    if not load.valid:
        return
    request = load.request
    host.leave(request)
    host.release_all(request, Fate.DROPPED)
    host.enqueue(request)


def forsake_remote(host: HostState, request: Request) -> None:
    """A request with a remote state ends, or needs it no more: whoever keeps it for the request may let it go."""
    if request.remote is not None:
        host.spared.append(request.remote)
        request.remote = request.load = None


def hold(host: HostState, row: DecodeRow | PrefillRow) -> Hold:
    """Keep what a row that has just been dispatched goes on from: S(n), and the pages of its n tokens."""
    request = row.request
    assert request.status is Status.RUNNING
    position = row.length + row.num_tokens
    slot = writes(row)[-1] if row.num_tokens else row.read_slot
    host.slots.retain(slot)
    pages: list[int] = []
    if host.pages is not None:
        pages = request.pages[: host.pages_for(position)]
        for page in pages:
            host.pages.retain(page)
    return Hold(slot, pages, position, host.slots, host.pages)


def hold_is_valid(host: HostState, held: Hold) -> bool:
    """Whether the store that it lies in is still there."""
    return held.slots_of is host.slots


def release_hold(host: HostState, held: Hold) -> None:
    """Let go of it, once."""
    if hold_is_valid(host, held):
        held.slots_of.release(held.slot)
        if held.pages_of is not None:
            for page in reversed(held.pages):
                held.pages_of.release(page)
