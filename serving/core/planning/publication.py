"""Publishes what a step wrote, as soon as it may be read and not before.

A prefill is published when its step has been dispatched: its tokens are known, and any reader's step runs later. A
decode row is published when its step has settled, which confirms its tokens. Publishing a state moves its
slot from the row to the index, without a copy.
"""

from serving.core.planning.host_state import HostState
from serving.core.requests.request import PlannedRow


def after_dispatch(host: HostState, row: PlannedRow) -> None:
    """Releases the slots and pages that the row only read, and publishes what it wrote if all its tokens were known."""
    request, progress = row.request, row.request.progress
    pages = progress.pages
    progress.state.dispatched(progress.content)
    host.stats.page_copies += pages.dispatched()
    if not row.is_prefill:
        return
    host.stats.prefill_tokens += row.num_tokens
    if row.end >= request.prompt_len:
        request.queueing.prompt_done = True
    index = host.cache.index
    if index is None:
        return
    if pages.publishes_at(row.end):
        index.publish_pages(progress.content, row.end)
    progress.state.trim(progress.last_access)


def after_settle(host: HostState, row: PlannedRow, before: int, after: int) -> None:
    """Publishes the boundary that the kept tokens (before, after] of a decode row crossed, and its full pages."""
    cache, request, progress = host.cache, row.request, row.request.progress
    index, block, pages = cache.index, cache.block, progress.pages
    assert index is not None
    # Tokens after a stop were fed, but do not belong to the sequence; and if a sequence has its
    # very last token there need not be a page.
    confirmed = min(after, len(request.tokens), request.max_total - 1)
    boundary = confirmed - confirmed % block
    if boundary > before:
        _publish_boundary(host, row, boundary, boundary - before - 1)
    if pages.publishes_at(confirmed):
        index.publish_pages(progress.content, confirmed)
    progress.publish_at = after - after % block + block
    if cache.pages is not None:
        progress.publish_at = min(progress.publish_at, (pages.num_published + 1) * pages.page_size)


def _publish_boundary(host: HostState, row: PlannedRow, boundary: int, nth: int) -> None:
    progress, pending = row.request.progress, host.pending
    state, later = progress.state, progress.unsettled[-1:]
    is_pending = pending is not None and bool(later) and later[0].step == pending.step
    state.publish_boundary(row.access, nth, progress.content, boundary, unsettled=bool(later), pending=is_pending)
    if pending is not None and state.leaving and later[0] not in pending.effects:
        pending.effects.append(later[0])
