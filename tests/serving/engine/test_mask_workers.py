"""Masks are computed off the engine's thread: a slow grammar holds up its own request only, and has a budget."""

import threading
import time
from types import SimpleNamespace

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


def scripted(work=lambda: None):
    """A choice whose masks take as long as a test wants."""

    def masks(drafts, heads):
        work()
        return np.full((heads, 1), len(drafts), np.uint32)

    return FollowedChoice(SimpleNamespace(masks=masks))


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
    choices = [scripted() for _ in requests]
    for i, (request, choice) in enumerate(zip(requests, choices, strict=True)):
        workers.submit(request, choice, [7] * i)
        assert request.blocked
    collect(workers, *requests)
    assert [int(choice.masks[0, 0]) for choice in choices] == list(range(5))
    assert not workers.collect()


def test_a_step_does_not_wait_for_a_choice_that_was_slow():
    workers, go_on = MaskWorkers(1, Inbox()), threading.Event()
    slow, quick = (Request(name, [1], lockstep=True) for name in ("slow", "quick"))
    stuck, other = scripted(lambda: go_on.wait(60)), scripted()
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


@pytest.mark.parametrize(
    ("limits", "work", "says"),
    [
        ({"_MOST_PER_STEP": 0.005}, lambda: compute(0.02), "for one token"),
        ({"_ALLOWANCE": 0.005}, lambda: compute(0.02), "takes too long"),
        ({}, lambda: 1 // 0, "division"),
    ],
)
def test_a_choice_has_a_budget_and_fails_alone(monkeypatch, limits, work, says):
    """Its grammar is the cause if it has taken too much time, and no other error is."""
    for limit, seconds in limits.items():
        monkeypatch.setattr(mask_workers, limit, seconds)
    workers, request = MaskWorkers(1, Inbox()), Request("r", [1], lockstep=True)
    workers.submit(request, scripted(work), ())
    found = []
    while not found:
        workers.collect(idle=True)
        found = workers.pop_refused()
    ((which, why, by_grammar),) = found
    assert which is request
    assert request.blocked
    assert says in why
    assert by_grammar == bool(limits)


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
