"""Leases of states: started, renewed and released, even if either side disconnects at any moment."""

import asyncio
import contextlib
import random
from types import SimpleNamespace

import pytest

from serving.api.http.errors import ApiError
from serving.split.http import routes
from serving.split.http.routes import PrefillRequest, WorkerPrompt
from serving.split.prefill_side import PrefillSide, TooMany
from tests.serving.split.test_manifest import BASE

BODY = PrefillRequest(kind="completions", body={})


class Engine:
    """Does what it is told in order, and takes its time for everything."""

    def __init__(self, pace):
        self.commands, self._pace = asyncio.Queue(), pace
        self._task = asyncio.create_task(self._run())

    async def _run(self):
        while True:
            function, done = await self.commands.get()
            await asyncio.sleep(self._pace())
            try:
                done.set_result(function(None))
            except Exception as error:
                done.set_exception(error)

    def tell(self, function):
        done = asyncio.get_running_loop().create_future()
        self.commands.put_nowait((function, done))
        return done

    async def call(self, function):
        return await asyncio.shield(self.tell(function))

    async def stream(self, request):
        await asyncio.sleep(self._pace() * 5)
        yield SimpleNamespace(num_cached_tokens=0, cache_write_tokens={})


def a_side(**settings):
    return PrefillSide(SimpleNamespace(loop=SimpleNamespace(sources=[]), manifest=BASE), **settings)


def a_context(pace):
    return SimpleNamespace(engine=Engine(pace), settings=SimpleNamespace(api_key=()))


@pytest.fixture
def no_prompt(monkeypatch):
    async def prompt(context, kind, body, headers):
        return WorkerPrompt([1, 2, 3], 0, None)

    monkeypatch.setattr(routes, "prompt_of", prompt)


async def test_clients_that_leave_at_any_moment_leave_no_places_taken(no_prompt):
    rng = random.Random(3)
    side = a_side(max_kept=200, lease=60.0)
    context = a_context(lambda: rng.random() * 0.002)

    async def one():
        await asyncio.sleep(rng.random() * 0.5)
        task = asyncio.create_task(routes._prefill(context, side, BODY, {}))
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ApiError):
            ticket = await task
            side.release(ticket.id, wanted=True)  # it was quicker

    await asyncio.gather(*(one() for _ in range(200)))
    for _ in range(500):
        if not side.kept and context.engine.commands.empty():
            break
        await asyncio.sleep(0.01)
    assert side.kept == 0
    assert side.stats.begun > 50


async def test_a_prompt_that_is_not_computed_in_time_is_given_up(no_prompt):
    side = a_side(lease=60.0)
    context = a_context(lambda: 0.05)
    late = BODY.model_copy(update={"seconds": 0.15})
    with pytest.raises(ApiError, match="in time") as error:
        await routes._prefill(context, side, late, {})
    assert error.value.status == 503
    await asyncio.sleep(0.4)
    assert side.kept == 0


async def test_a_lease_does_not_run_out_while_its_prompt_is_computed(no_prompt):
    side = a_side(lease=0.2, max_lease=60.0)
    context = a_context(lambda: 0.1)  # half a second for the prompt
    working = asyncio.create_task(routes._prefill(context, side, BODY, {}))
    expired = 0
    while not working.done():
        expired += side.sweep()
        await asyncio.sleep(0.01)
    assert not expired
    assert side.kept == 1
    for _ in range(500):
        if side.sweep():
            break
        await asyncio.sleep(0.01)
    assert side.kept == 0, "the state is not needed any more"


def test_a_lease_is_finite_from_the_start_and_renewed_up_to_a_limit():
    now = [0.0]
    side = a_side(lease=10.0, max_lease=25.0, max_kept=2)
    side._clock = lambda: now[0]
    first, second = side.begin("first"), side.begin()
    assert second.id != first.id
    with pytest.raises(TooMany):
        side.begin()
    now[0] = 9.0
    side.renew(["first", "unknown"])
    now[0] = 11.0
    assert side.sweep() == 1
    assert second.done
    for now[0] in (18.0, 24.0):
        side.renew(["first"])
        assert side.sweep() == 0
    now[0] = 25.5
    side.renew(["first"])
    assert side.sweep() == 1, "asking does not keep it for ever"
    assert side.kept == 0


def test_a_client_takes_no_more_places_than_remain_free():
    side = a_side(max_kept=4)
    steps = ("a", True), ("a", True), ("a", False), ("b", True), ("b", False), (None, True), (None, False)
    for client, room in steps:
        with contextlib.nullcontext() if room else pytest.raises(TooMany):
            side.begin(client=client)
