"""Waiting requests are served in turn: clients, then requests, then the choices of a request."""

from collections import Counter
from collections.abc import Iterable

import pytest

from serving.core.planning.admission import DISPLACE_AFTER, MOST_DISPLACEMENTS
from serving.core.requests.drafts import OPTIMISM, AdaptiveDrafts, DraftPolicy
from serving.core.requests.queues import Queues
from serving.core.requests.request import Request, Status
from tests.serving.core.drive import Loop


class Line:
    """Queues alone, with requests that are admitted one at a time."""

    def __init__(self) -> None:
        self.queues, self.arrivals = Queues(10_000), 0

    def add(self, name: str, n: int = 1, client: str | None = None, priority: int = 0) -> list[Request]:
        made = []
        for index in range(n):
            self.arrivals += 1
            request = Request(
                name if not index else f"{name}#{index}", [1], fork_of=name if index else None, client=client,
                priority=priority,
            )  # fmt: skip
            request.arrival = self.arrivals
            self.queues.unfinished[request.request_id] = request
            self.queues.start(request)
            made.append(request)
        return made

    def add_each(self, names: Iterable[str], priority: int = 0) -> None:
        """A request each, of the client whose name it begins with."""
        for name in names:
            self.add(name, client=name[0], priority=priority)

    def admit(self) -> Request:
        request = next(self.queues.in_turn())
        self.queues.admitted(request)
        self.queues.free_row_ids.pop()
        self.queues.check()
        return request

    def end(self, request: Request) -> None:
        """Ends a request that runs or waits."""
        self.queues.leave(request)
        if request.status is Status.RUNNING:
            self.queues.free_row_ids.append(1)
        del self.queues.unfinished[request.request_id]

    def names(self, count: int, *, ending: bool = False) -> list[str]:
        """The next requests that are admitted; `ending`: each ends before the next one is."""
        found = []
        for _ in range(count):
            assert Counter(self.queues.in_turn()) == Counter(self.queues.waiting)
            request = self.admit()
            found.append(request.request_id)
            if ending:
                self.end(request)
        return found


def test_first_choices_come_before_second_ones() -> None:
    line = Line()
    line.add("a", 3)
    line.add("b", 2)
    assert line.names(2) == ["a", "b"]
    line.add("c")
    assert line.names(4) == ["c", "a#1", "b#1", "a#2"]


def test_clients_take_turns() -> None:
    line = Line()
    line.add_each(["a0", "a1", "a2", "a3", "b0", "b1"])
    assert line.names(6, ending=True) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    line.add_each(["a0+", "a1+", "a2+"])
    assert line.names(1, ending=True) == ["a0+"]
    line.add_each(["b0+", "b1+"])  # it has saved up nothing, and has lost nothing
    assert line.names(4, ending=True) == ["b0+", "a1+", "b1+", "a2+"]


def test_nothing_is_kept_of_clients_that_have_gone() -> None:
    line = Line()
    for number in range(100):
        line.add(f"admitted{number}", client=f"a{number}", priority=number)
        line.end(line.admit())
        line.end(*line.add(f"canceled{number}", client=f"c{number}"))
    assert not any(kept for kept in vars(line.queues).values() if isinstance(kept, dict))


def test_a_client_with_more_rows_saves_up_one_turn_at_most() -> None:
    line = Line()
    line.add_each(f"{client}{i}" for client in "ab" for i in range(40))
    held = line.admit()
    assert {name[0] for name in line.names(20, ending=True)} == {"b"}
    line.end(held)
    assert Counter(name[0] for name in line.names(11, ending=True)) == {"a": 6, "b": 5}


def test_canceled_requests_at_other_priorities_change_no_turn() -> None:
    line, found = Line(), Counter[str | None]()
    low = [line.add(f"low{number}", client="x", priority=1 + number)[0] for number in range(20)]
    line.add_each([*(f"a{i}" for i in range(40)), "x"])
    for number in range(20):
        request = line.admit()
        line.end(request)
        line.end(low.pop())
        found[request.client] += 1
        if request.client == "x":
            line.add(f"x{number}", client="x")
    assert found == {"a": 10, "x": 10}


def test_priority_comes_first() -> None:
    line = Line()
    line.add("low", 2, client="a", priority=1)
    line.add("high", 2, client="b")
    assert line.names(4) == ["high", "high#1", "low", "low#1"]


def test_later_choices_are_not_overtaken_for_ever() -> None:
    line = Line()
    line.add("many", 4)
    for i in range(1000):
        line.add(f"new{i}")
        line.add(f"more{i}")  # they come twice as fast as they are admitted
        line.admit()
        if not any(request.request_id.startswith("many") for request in line.queues.waiting):
            return
    raise AssertionError("later choices starve")


@pytest.mark.parametrize(
    ("client", "belongs_to", "steps"),
    [(None, "fork_of", DISPLACE_AFTER + 2), ("victim", "fork_of", 2), (None, "batch_id", DISPLACE_AFTER + 2)],
)
def test_a_request_with_many_choices_gives_up_a_row(client: str | None, belongs_to: str, steps: int) -> None:
    """One request, or one call with many prompts, holds all rows for thousands of tokens. A request of another client
    begins in the second step, one of the same client after a few steps, before the last choices or prompts."""
    loop = Loop(max_num_seqs=4, max_model_len=64, cache_mode="all")
    options = {"client": "greedy"} if client else {}
    for i in range(8):
        prompt = [1 if belongs_to == "fork_of" else i, 2, 3]
        of_first = {belongs_to: "greedy"} if i or belongs_to == "batch_id" else {}
        loop.add(prompt, max_tokens=60, request_id=f"greedy#{i}" if i else "greedy", **of_first, **options)
    while len(loop.scheduler.queues.running) < 4:
        loop.step()
    victim = loop.add([7, 8], max_tokens=3, client=client)
    assert loop.scheduler.queues.waiting[0] is victim
    for _ in range(steps):
        assert not victim.progress.row_id
        loop.step()
    assert victim.progress.row_id
    loop.steps(4)
    assert victim.finished
    assert loop.scheduler.stats()["displacements"] == 1
    loop.finish()
    assert loop.scheduler.stats()["preemptions"] >= 1


def test_requests_of_one_choice_each_are_not_displaced() -> None:
    loop = Loop(max_num_seqs=2, max_model_len=64)
    for i in range(2):
        loop.add([i], max_tokens=50)
    loop.step()
    waits = loop.add([5], max_tokens=1)
    loop.steps(3 * DISPLACE_AFTER)
    assert waits.status is Status.WAITING
    loop.finish()
    assert loop.scheduler.stats()["displacements"] == 0


def test_all_finish_however_many_others_come() -> None:
    loop = Loop(max_num_seqs=2, max_model_len=64)
    for i in range(4):
        loop.add([1], max_tokens=40, request_id="many" if not i else f"many#{i}", fork_of="many" if i else None)
    many = list(loop.scheduler.queues.waiting)
    for step in range(2500):
        if step % 20 == 0:
            loop.add([step % 9], max_tokens=3)
        loop.step()
        if all(request.finished for request in many):
            break
    assert all(request.finished for request in many)
    assert max(request.queueing.num_displacements for request in many) <= MOST_DISPLACEMENTS
    loop.finish()


def requests(count: int) -> list[Request]:
    return [Request(str(i), [1, 2, 3]) for i in range(count)]


def teach(policy: AdaptiveDrafts, request: Request, *accepted: int, times: int = 60) -> None:
    for each in accepted * times:
        policy.observe(request, policy.most, each)


def counts(policy: DraftPolicy, rows: list[Request]) -> list[int]:
    policy.begin(rows)
    return [policy.wanted(row) for row in rows]


def test_all_that_fit_where_nothing_is_known() -> None:
    for policy, rows in ((DraftPolicy(3), 64), (AdaptiveDrafts(3, knee=5), 1), (AdaptiveDrafts(3, knee=100), 32)):
        assert counts(policy, requests(rows)) == [3] * rows


def test_none_where_a_full_batch_makes_them_expensive() -> None:
    """32 rows of which each gets 2 of 3 drafts accepted: worth it where a step has room for them, and only there."""
    for knee, worth in ((5, False), (20, False), (50, True), (200, True)):
        policy, rows = AdaptiveDrafts(3, knee=knee), requests(32)
        for row in rows:
            teach(policy, row, 3, 2, 2, 1, times=10)
        assert any(counts(policy, rows)) == worth, knee
    # The same rows, few at a time.
    assert all(counts(AdaptiveDrafts(3, knee=5), requests(4)))


def test_each_row_has_the_number_that_pays() -> None:
    policy, (good, fair, bad) = AdaptiveDrafts(5, knee=100), requests(3)
    teach(policy, good, 5)
    teach(policy, fair, 1, 2, times=40)
    teach(policy, bad, 0)
    high, middle, low = counts(policy, [good, fair, bad])
    assert (high, low) == (5, 1)
    assert 1 < middle < 5


def test_drafts_that_never_come_are_not_waited_for() -> None:
    policy, rows = AdaptiveDrafts(3, knee=5), requests(1)
    for _ in range(60):
        policy.observe(rows[0], 0, 0)
    assert counts(policy, rows) == [0]


def test_what_failed_is_tried_again_now_and_then() -> None:
    policy, rows = AdaptiveDrafts(3, knee=5), requests(1)
    teach(policy, rows[0], 0)
    tried = 0
    for _ in range(400):
        if counts(policy, rows) != [0]:
            tried += 1
            policy.observe(rows[0], 3, 0)
    assert 2 <= tried <= 20
    # Once they are right again, they stay.
    while counts(policy, rows) == [0]:
        pass
    teach(policy, rows[0], 3, times=20)
    assert counts(policy, rows) == [3]


def test_new_rows_begin_with_what_is_common() -> None:
    policy, (old, new) = AdaptiveDrafts(3, knee=5), requests(2)
    teach(policy, old, 0, times=200)
    assert counts(policy, [new]) == [0]
    assert new.draft_acceptance is not None
    assert new.draft_acceptance < OPTIMISM / 2


@pytest.mark.parametrize(("right", "most"), [(1.0, 3), (0.0, 0)])
def test_the_scheduler_asks_and_tells(right: float, most: int) -> None:
    loop = Loop(
        rightness=right, drafts=AdaptiveDrafts(3, knee=5), num_speculative_tokens=3, num_pages=400, max_model_len=600
    )
    loop.add([1, 2, 3], max_tokens=400)
    loop.steps(60)
    planned = [row.num_drafts for plan in loop.plans for row in plan.decode]
    assert planned[0] == 3
    assert planned[20:].count(most) > 35
