"""Which requests wait, which run, and which row ids are free.

Waiting requests are served fairly: the client (API key) with the fewest rows first, equal clients in turn, and of each
client the first choice of each call before the second of any.
Running requests are ordered by priority, then arrival: the last one is preempted first.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter

from serving.core.cache.content import count_down
from serving.core.requests.request import Request, Status

_ORDER, _PLACE = attrgetter("order"), attrgetter("place")
_STARTS_PER_TURN = 64
"""New requests that may start at the same turn: those with later turns are not overtaken for ever."""


class _Group:
    """Waiting requests of one client and one priority."""

    __slots__ = ("served", "started", "turn", "waiting")

    def __init__(self, served: int) -> None:
        self.waiting: list[Request] = []
        """By turn, rank and arrival."""
        self.served = served
        """Admissions, and those that others had before this one came or while it had more rows: the group with the
        fewest is next."""
        self.turn = self.started = 0
        """How many requests have started at this turn."""

    def new_turn(self) -> int:
        """The turn of a request that starts now: that of the first one waiting."""
        if not self.waiting:
            return 0
        if self.waiting[0].queueing.turn != self.turn:
            self.turn, self.started = self.waiting[0].queueing.turn, 0
        self.started += 1
        return self.turn + self.started // _STARTS_PER_TURN


class Queues:
    """All unfinished requests. `num_rows`: how many may run at once."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.unfinished: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """Ordered by priority, turn, rank and arrival; `in_turn` is the order of clients."""
        self.running: list[Request] = []
        """By priority, then arrival: the last one is preempted first."""
        self.free_row_ids = list(range(num_rows, 0, -1))
        self.rows: Counter[str | None] = Counter()
        """Number of running requests by client."""
        self._groups: dict[tuple[int, str | None], _Group] = {}
        self._turn = 0
        """The most that a group had been `served` when it was admitted, or when it had gone: where a group that comes
        begins, so that clients with one request at a time, whose groups go and come, are not always first. A group
        with less continues from here after its next admission: it has saved up one turn at most, whatever was admitted
        at other priorities or while it had more rows."""

    @property
    def clients(self) -> set[str | None]:
        """Clients with unfinished requests."""
        return {client for _, client in self._groups} | self.rows.keys()

    def waiting_tokens(self, most: int) -> Counter[str | None]:
        """Returns the number of tokens of waiting requests that are not blocked, by client, up to about `most` each."""
        found = Counter[str | None]()
        for (_, client), group in self._groups.items():
            for request in islice(group.waiting, 64):
                if found[client] >= most:
                    break
                found[client] += 0 if request.blocked else len(request.tokens)
        return found

    def start(self, request: Request) -> None:
        """A new request: gives it its turn, and queues it."""
        first = self.unfinished.get(request.flow)
        group = self._groups.get((request.priority, request.client))
        if first is not None and first is not request:
            first.queueing.last_turn += 1
            request.queueing.turn, request.queueing.rank = first.queueing.last_turn, 1
        elif group is not None:
            request.queueing.turn = group.new_turn()
        request.queueing.last_turn = request.queueing.turn
        self._insert(request)

    def enqueue(self, request: Request) -> None:
        """Back to the waiting ones, before all others of its client."""
        group = self._groups.get((request.priority, request.client))
        if group is not None and group.waiting:
            request.queueing.turn = min(request.queueing.turn, group.waiting[0].queueing.turn)
        request.queueing.rank = -1
        self._insert(request)

    def enqueue_behind(self, request: Request, other: Request) -> None:
        """Back to the waiting ones, so that `other`, which waits, is served before it."""
        request.queueing.turn, request.queueing.rank = max(request.queueing.turn, other.queueing.turn + 1), 1
        self._insert(request)
        mine, theirs = (self._groups[each.priority, each.client] for each in (request, other))
        if mine is not theirs:
            mine.served = max(mine.served, theirs.served + 1)

    def admitted(self, request: Request) -> None:
        """From the waiting ones to the running ones; its client has had its turn."""
        group = self._groups[request.priority, request.client]
        self._turn = max(self._turn, group.served)
        group.served = self._turn + 1
        self.leave(request)
        request.status = Status.RUNNING
        self.rows[request.client] += 1
        insort(self.running, request, key=_ORDER)

    def leave(self, request: Request) -> None:
        """Out of the queue that it is in."""
        if request.status is Status.RUNNING:
            del self.running[bisect_left(self.running, request.order, key=_ORDER)]
            count_down(self.rows, request.client)
            return
        del self.waiting[bisect_left(self.waiting, request.place, key=_PLACE)]
        name = (request.priority, request.client)
        group = self._groups[name]
        del group.waiting[bisect_left(group.waiting, request.place, key=_PLACE)]
        if not group.waiting:
            del self._groups[name]
            self._turn = max(self._turn, group.served)

    def in_turn(self) -> Iterator[Request]:
        """Waiting requests in the order in which they are to be admitted.

        Between two of them the first may be `admitted`; nothing else may change. Of a client whose request was not, the
        next one comes after those of the other clients.
        """
        groups = self._groups
        for priority in sorted({priority for priority, _ in groups}):
            names = [name for name in groups if name[0] == priority]
            heap = [
                (self.rows[name[1]], groups[name].served, groups[name].waiting[0].arrival, i, 0)
                for i, name in enumerate(names)
            ]
            heapq.heapify(heap)
            while heap:
                rows, served, _, i, at = heapq.heappop(heap)
                group = groups[names[i]]
                request = group.waiting[at]
                yield request
                at += request.status is Status.WAITING
                if names[i] in groups and at < len(group.waiting):
                    heapq.heappush(heap, (rows + 1, served + 1, group.waiting[at].arrival, i, at))

    def stop_all(self) -> list[Request]:
        """Stop all running requests: returns them, in no queue. All row ids are free."""
        stopped, self.running[:] = self.running.copy(), []
        self.rows.clear()
        self.free_row_ids = list(range(self.num_rows, 0, -1))
        return stopped

    def could_be_admitted(self, besides: int) -> int:
        """Returns the number of waiting requests that can get a free row id. `besides`: waiting ones with a row id."""
        return min(len(self.free_row_ids), len(self.waiting) - besides)

    def check(self) -> None:
        """Raise `AssertionError` unless every row id and every request is accounted for."""
        assert len(self.free_row_ids) + len(self.running) == self.num_rows, "row ids leaked"
        assert len(self.unfinished) == len(self.running) + len(self.waiting), "requests leaked"
        assert self.rows == Counter(request.client for request in self.running), "rows of clients are miscounted"
        grouped = [request for group in self._groups.values() for request in group.waiting]
        assert sorted(grouped, key=_PLACE) == self.waiting, "clients' queues differ from the queue of all"
        assert all(group.waiting for group in self._groups.values()), "an empty group is left"

    def _insert(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=_PLACE)
        name = (request.priority, request.client)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(self._turn)
        insort(group.waiting, request, key=_PLACE)
