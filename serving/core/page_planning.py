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
        page = host.pages.take()
        if not page and copy is not None and host.pages.refs[copy[0]] == 1:
            _spare_copy(host, request, copy)
            copy = None
            page = host.pages.take()
        if not page and preempting:
            page = _take_from_others(host, request, plan)
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


def _take_from_others(host: HostState, request: Request, plan: StepPlan) -> int:
    """A page at the cost of whoever comes after a request in the order.

    0 = there is nobody such. The first in the order never gets 0: everybody else can be made to go, and a request that
    would not fit alone was refused. So something always advances, and whoever got 0 is served when those before it
    are done.
    """
    assert host.pages is not None
    page = 0
    while not page:
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
    if pages.owners[source] is None and pages.refs[source] == 1:
        request.shared_page = -1
        return True, None
    target = pages.take()
    if not target and pages.refs[source] == 1:
        _unshare(host, request)
        return True, None
    if not target and preempting:
        target = _take_from_others(host, request, plan)
    if not target:
        return False, None
    request.pages[at] = target
    request.shared_page = -1
    return True, (source, target)


def _spare_copy(host: HostState, request: Request, copy: PageCopy) -> None:
    """Go without a copy of a page that no other row reads: the copy's page is wanted more."""
    put_back(host, request, copy)
    _unshare(host, request)


def _unshare(host: HostState, request: Request) -> None:
    """Drop the checkpoint that shares a row's page: better to lose one that nobody reads than somebody's work."""
    assert host.pages is not None
    entry = host.pages.owners[request.pages[request.shared_page]]
    if entry is not None:
        assert host.index is not None
        host.index.drop_state(entry)
    request.shared_page = -1
