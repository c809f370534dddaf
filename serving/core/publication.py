"""Making what a step wrote findable, and not a moment before it may be read.

What catches up is published when its step has been dispatched: its tokens are known, and any reader's step runs later.
What decodes is published when its step has settled: only then is every token confirmed. Publishing a state is moving
its slot from the row to the index: never a copy.
"""

from serving.core.host_state import HostState
from serving.core.plan import DecodeRow, Row
from serving.core.policy import Kind


def after_dispatch(host: HostState, row: Row) -> None:
    """Let go of what the row only read, and publish what it wrote if every token of it was known."""
    request, state = row.request, row.request.state
    if row.release_slot:
        host.slots.release(row.release_slot)
        row.release_slot = 0
    if row.page_copy is not None and host.pages is not None:
        host.pages.release(row.page_copy[0])
        host.stats.page_copies += 1
    if not row.catching_up:
        return
    end = row.length + row.num_tokens
    host.stats.prefill_tokens += row.num_tokens
    if end >= request.prompt_len:
        request.prompt_done = True
    index = host.index
    if index is None:
        return
    for mark in row.marks:
        new = index.publish_state(request, mark.position, mark.slot, mark.kind)
        if mark.position != end:
            host.slots.release(mark.slot)
        elif new:
            # The row's next step reads it; the reference stays, the right to write goes.
            state.own.remove(mark.slot)
            state.held = mark.slot
            if host.pages is not None and end % host.config.page_size:
                request.shared_page = end // host.config.page_size
    if host.pages is not None and end // host.config.page_size > request.num_published:
        index.publish_pages(request, end)
    row.marks = ()
    host.trim_slots(request)


def after_settle(host: HostState, row: DecodeRow, before: int, after: int) -> None:
    """Publish the boundary that the kept tokens (before, after] of a decoding row crossed, and its full pages."""
    index, request = host.index, row.request
    assert index is not None
    block = host.config.state_block_size
    # Tokens behind a stop that cut the step short were fed, but are not the sequence's; and where a sequence has its
    # very last token there need not be a page.
    confirmed = min(after, len(request.tokens), request.max_total - 1)
    boundary = confirmed - confirmed % block
    if boundary > before:
        slot = row.write_slots[boundary - before - 1]
        if slot in row.boundary_slots:
            _publish_boundary(host, row, boundary, slot)
    if host.pages is not None and confirmed // host.config.page_size > request.num_published:
        index.publish_pages(request, confirmed)


def _publish_boundary(host: HostState, row: DecodeRow, boundary: int, slot: int) -> None:
    request, state = row.request, row.request.state
    if len(state.own) == 1 and not host.can_spare_slot():
        # The row needs another to write, and so does whoever waits.
        host.stats.boundaries_not_kept += 1
        return
    assert host.index is not None
    if not host.index.publish_state(request, boundary, slot, Kind.BOUNDARY):
        return
    state.own.remove(slot)
    if slot != state.current:
        host.slots.release(slot)
    elif not request.flights:
        state.held = slot
    elif host.pending is not None and request.flights[-1].step == host.pending.step:
        # The step that reads it is planned and not yet dispatched.
        request.flights[-1].release_slot = slot
        if request.flights[-1] not in host.pending.effects:
            host.pending.effects.append(request.flights[-1])
    else:
        host.slots.release(slot)
