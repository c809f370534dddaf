"""Masks are computed off the engine's thread: a slow grammar holds up its own request only, and has a budget."""

import threading
import time

import numpy as np
import pytest

from serving import SamplingParams
from serving.core.errors import RequestError
from serving.core.requests.request import Request
from serving.engine.structured import mask_workers
from serving.engine.structured.mask_workers import FollowedChoice, MaskWorkers
from serving.state_transfer.source import Inbox
from tests.serving.differential.test_structured_with_plain import Drafts, engine_of
from tests.support.engines.engines import finish


class Scripted:
    """A constraint whose masks take as long as a test wants."""

    def __init__(self, work=lambda: None):
        self.work = work

    def masks(self, drafts, heads):
        self.work()
        return np.full((heads, 1), len(drafts), np.uint32)


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def collect(workers, *requests):
    end = time.monotonic() + 60
    while any(request.blocked for request in requests):
        assert time.monotonic() < end
        workers.collect(idle=True)


def test_masks_of_all_choices_arrive():
    workers = MaskWorkers(3, Inbox())
    requests = [Request(f"r{i}", [1], lockstep=True) for i in range(5)]
    choices = [FollowedChoice(Scripted()) for _ in requests]
    for i, (request, choice) in enumerate(zip(requests, choices, strict=True)):
        workers.submit(request, choice, [7] * i)
        assert request.blocked
    collect(workers, *requests)
    assert [int(choice.masks[0, 0]) for choice in choices] == list(range(5))
    assert not workers.collect()


def test_a_step_does_not_wait_for_a_choice_that_was_slow():
    workers, go_on = MaskWorkers(1, Inbox()), threading.Event()
    slow, quick = (Request(name, [1], lockstep=True) for name in ("slow", "quick"))
    stuck, other = FollowedChoice(Scripted(lambda: go_on.wait(60))), FollowedChoice(Scripted())
    workers.submit(slow, stuck, ())
    workers.collect()  # waits for a moment, once
    assert slow.blocked
    assert stuck.slow
    for _ in range(3):
        workers.submit(quick, other, ())
        collect(workers, quick)
    workers.collect(idle=True)  # nothing else to do: returns soon
    assert slow.blocked
    go_on.set()
    collect(workers, slow)
    assert not stuck.slow  # it took no time of a processor


@pytest.mark.parametrize(("limit", "says"), [("_MOST_PER_STEP", "for one token"), ("_ALLOWANCE", "takes too long")])
def test_a_choice_has_a_budget(monkeypatch, limit, says):
    monkeypatch.setattr(mask_workers, limit, 0.005)
    why, by_grammar = refused(lambda: compute(0.02))
    assert says in why
    assert by_grammar


def refused(work):
    """Why a request is refused whose masks take this work, and whether its grammar is the cause."""
    workers, request = MaskWorkers(1, Inbox()), Request("r", [1], lockstep=True)
    workers.submit(request, FollowedChoice(Scripted(work)), ())
    found = []
    while not found:
        workers.collect(idle=True)
        found = workers.pop_refused()
    ((which, *why),) = found
    assert which is request
    assert request.blocked
    return why


def test_masks_that_cannot_be_computed_fail_their_request():
    why, by_grammar = refused(lambda: 1 // 0)
    assert "division" in why
    assert not by_grammar


def test_a_request_over_its_budget_is_refused(monkeypatch):
    monkeypatch.setattr(mask_workers, "_ALLOWANCE", -1.0)
    engine = engine_of(Drafts(), "all")
    params = SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]{5}"})
    output = engine.add_request("r", {"prompt_token_ids": [5, 6]}, params)
    finish(engine)
    assert isinstance(output.failure, RequestError)
    assert "following the grammar takes too long" in str(output.failure)
    assert not engine.loop.scheduler.queues.unfinished
    engine.loop.scheduler.check(idle=True)
