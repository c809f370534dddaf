"""The pages of a row's next step: as many as it can reach, and one of its own where others may read the last."""

from serving.core.host_state import HostState
from serving.core.plan import StepPlan
from serving.core.preemption import preempt
from serving.core.request import Request

PageCopy = tuple[int, int]


def prepare_pages(
    host: HostState, request: Request, end: int, plan: StepPlan, *, preempting: bool
) -> tuple[bool, PageCopy | None]:
    """See that a step which feeds tokens up to `end` can write their pages: (whether it can, the copy that it needs).

    If it cannot, no copy is left behind; pages that were got on the way stay with the request.
    """
    if host.pages is None:
        return True, None
    copy = None
    if request.shared_page >= 0:
        ready, copy = _own_shared_page(host, request, plan, preempting=preempting)
        if not ready:
            return False, None
    pages = request.pages
    need = host.pages_for(host.reach(request, end))
    while len(pages) < need:
        page = _take(host, request, plan, preempting=preempting)
        if not page:
            put_back(host, request, copy)
            return False, None
        pages.append(page)
    return True, copy


def put_back(host: HostState, request: Request, copy: PageCopy | None) -> None:
    """The copy of a shared page will not be made after all."""
    if copy is None or host.pages is None:
        return
    source, target = copy
    at = request.pages.index(target)
    request.pages[at] = source
    request.shared_page = at
    host.pages.release(target)


def _take(host: HostState, request: Request, plan: StepPlan, *, preempting: bool) -> int:
    """A page for a request: free, or cached, or, if `preempting`, taken from whoever is after it in the order.

    0 = not to be had now. The first in the order never gets 0, since everybody else can be made to go and the request
    was refused unless it fits alone; so something always advances, and whoever got 0 is served when those before it
    are done.
    """
    assert host.pages is not None
    page = host.pages.take()
    while not page and preempting:
        victim = host.running[-1]
        if victim is request:
            break
        preempt(host, victim, plan)
        page = host.pages.take()
    return page


def _own_shared_page(
    host: HostState, request: Request, plan: StepPlan, *, preempting: bool
) -> tuple[bool, PageCopy | None]:
    """Before a row writes into the partly filled page that others may read: (whether it may, the copy to make first).

    The source stays referenced: it may only be let go once the step that copies it has been dispatched.
    """
    pages, at = host.pages, request.shared_page
    assert pages is not None
    source = request.pages[at]
    target = 0
    if pages.owners[source] is not None or pages.refs[source] > 1:
        target = pages.take()
        if not target and pages.refs[source] > 1:
            target = _take(host, request, plan, preempting=preempting)
            if not target:
                return False, None
    request.shared_page = -1
    if target:
        request.pages[at] = target
        return True, (source, target)
    if pages.owners[source] is not None:
        # Better to lose a checkpoint that nobody reads than somebody's work.
        assert host.index is not None
        host.index.drop_state(pages.owners[source])
    return True, None
