"""Who waits, who runs, and which row ids are free."""

from bisect import bisect_left, insort
from operator import attrgetter

from serving.core.requests.request import Request, Status

_ORDER = attrgetter("order")


class Queues:
    """All unfinished requests. `num_rows`: how many may run at once."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.unfinished: dict[str, Request] = {}
        self.waiting: list[Request] = []
        """By priority, then arrival."""
        self.running: list[Request] = []
        """By priority, then arrival: the last one is preempted first."""
        self.free_row_ids = list(range(num_rows, 0, -1))

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

    def stop_all(self) -> list[Request]:
        """Nobody runs any more: those who did, in no queue, and all row ids are free."""
        stopped, self.running[:] = self.running.copy(), []
        self.free_row_ids = list(range(self.num_rows, 0, -1))
        return stopped

    def could_be_admitted(self, besides: int) -> int:
        """How many waiting requests there are row ids for, `besides` those of them that have theirs already."""
        return min(len(self.free_row_ids), len(self.waiting) - besides)

    def check(self) -> None:
        """Raise `AssertionError` unless every row id and every request is accounted for."""
        assert len(self.free_row_ids) + len(self.running) == self.num_rows, "row ids leaked"
        assert len(self.unfinished) == len(self.running) + len(self.waiting), "requests leaked"
