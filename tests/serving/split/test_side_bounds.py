"""What either side holds for the other is bounded, in time, in number and in bytes, whenever clients leave."""

import asyncio
import contextlib
import random
from types import SimpleNamespace
from unittest import mock

import pytest

from serving.api.http.errors import ApiError
from serving.engine.requests.request import EngineRequest
from serving.split.http import routes
from serving.split.http.routes import PrefillRequest
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.settings import SplitSettings
from serving.split.wire import SplitTimeout, StateRequest
from tests.serving.split.test_manifest import BASE
from tests.support.fleets.split_pair import B, Pair, assert_as_alone, tokens
from tests.support.servers.fake_workers import until

PROMPT = tokens(1, 3 * B + 5)


def want_of(pair, ticket):
    worker = pair.decode_side.worker
    return StateRequest(
        id=ticket.id, start=0, unit=worker.manifest.page_size, layers=worker.manifest.attention_layers,
        transport="direct", manifest=pair.prefill_side.worker.manifest.digest,
    )  # fmt: skip


def test_leases_run_out():
    """Held or copied, nothing stays; who comes too late computes the prompt."""
    pair, now = Pair("all"), [0.0]
    side = pair.prefill_side
    side._clock = lambda: now[0]
    held, copied = pair.compute(PROMPT), pair.compute(tokens(4, 40))
    (transport,) = side.worker.transports.values()
    pair.peer.offer(want_of(pair, copied), 9.0)
    assert (side.stats.held, side.stats.copies, side.stats.copied_bytes > 0) == (1, 1, True)
    now[0] = 29.0
    assert side.sweep() == 0
    now[0] = 31.0
    assert side.sweep() == 2
    assert side.stats.expired == 2
    assert not transport.offered
    assert_as_alone(PROMPT, pair.run(PROMPT, ticket=held))
    assert pair.decode_side.stats.failed == 1
    pair.assert_idle()


def test_states_of_requests_that_wait_for_a_seat_are_not_let_go():
    pair, now = Pair("all", decode={"max_num_seqs": 2}), [0.0]
    pair.prefill_side._clock = lambda: now[0]
    renewed, renew = set(), pair.peer.renew
    pair.peer.renew = lambda ids: renewed.update(ids) or renew(ids)
    prompts = [tokens(20 + i, B + i) for i in range(8)]
    outputs = [pair.add(prompt, pair.compute(prompt)) for prompt in prompts]
    while pair.decode.loop.busy:
        now[0] += 5.0  # of a lease of 30
        pair.decode_side.renew()
        pair.prefill_side.sweep()
        pair.decode.step()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_as_alone(prompt, output)
    assert now[0] > 60
    assert pair.prefill_side.stats.expired == 0
    assert pair.decode_side.stats.arrived == len(prompts)
    assert len(renewed) == len(prompts)
    pair.assert_idle()


def test_copies_are_capped_in_bytes():
    pair = Pair("all")
    pair.prefill_side.settings = SplitSettings(max_transfer_bytes=pair.state_bytes)
    first, second = (pair.compute(tokens(30 + i, B + 3)) for i in range(2))
    pair.prefill_side.offer(want_of(pair, first))
    with pytest.raises(TooMany, match="bytes pending"):
        pair.prefill_side.offer(want_of(pair, second))
    assert pair.prefill_side.kept == 2, "it can be asked for again"
    pair.prefill_side.release(first.id, wanted=True)
    pair.prefill_side.offer(want_of(pair, second))
    pair.prefill_side.release(second.id, wanted=False)
    pair.assert_idle()


def test_arrivals_wait_for_room_and_not_for_ever():
    pair = Pair("all", settings=SplitSettings(fetch_timeout=0.2))
    side = pair.decode_side
    side._arriving = side.settings.max_transfer_bytes
    prompt = tokens(40, B + 3)
    assert_as_alone(prompt, pair.run(prompt))
    assert (side.stats.arrived, side.stats.failed) == (0, 1)
    side._arriving = 0
    assert_as_alone(tokens(41, B), pair.run(tokens(41, B)))
    assert side.stats.arrived == 1
    assert side._arriving == 0
    pair.assert_idle()


def test_who_does_not_answer_is_not_asked_by_the_next_ones():
    pair, offer = Pair("all"), mock.Mock(side_effect=SplitTimeout("no answer"))
    pair.peer.offer = offer
    for i in range(4):
        prompt = tokens(50 + i, B + 3)
        assert_as_alone(prompt, pair.run(prompt))
    assert offer.call_count == 1
    assert pair.decode_side.stats.failed == 4
    pair.assert_idle()


def test_a_request_that_has_waited_long_enough_waits_no_more():
    pair, prompt = Pair("all"), tokens(60, B + 3)
    ticket = pair.compute(prompt).model_copy(update={"patience": 1e-9})
    assert_as_alone(prompt, pair.run(prompt, ticket=ticket))
    assert pair.decode_side.stats.failed == 1
    pair.prefill_side.release(ticket.id, wanted=False)
    pair.assert_idle()


BODY = PrefillRequest(kind="completions", body={})


class Engine:
    """Does what it is told in order, and takes its time for everything."""

    def __init__(self, pace):
        self.commands, self._turn, self._pace = set(), asyncio.Lock(), pace

    async def _run(self, function):
        async with self._turn:
            await asyncio.sleep(self._pace())
            return function(None)

    def tell(self, function):
        self.commands.add(command := asyncio.create_task(self._run(function)))
        command.add_done_callback(self.commands.discard)
        return command

    async def call(self, function):
        return await asyncio.shield(self.tell(function))

    async def stream(self, request):
        await asyncio.sleep(self._pace() * 5)
        yield SimpleNamespace(num_cached_tokens=0, cache_write_tokens={})


def a_side(**settings):
    return PrefillSide(SimpleNamespace(loop=SimpleNamespace(sources=[]), manifest=BASE), SplitSettings(**settings))


def a_context(pace):
    return SimpleNamespace(engine=Engine(pace), settings=SimpleNamespace(api_key=()))


@pytest.fixture
def no_prompt(monkeypatch):
    monkeypatch.setattr(routes, "prompt_of", mock.AsyncMock(return_value=([1, 2, 3], EngineRequest("r", [1, 2, 3]))))


async def test_clients_that_leave_at_any_moment_leave_no_places_taken(no_prompt):
    rng = random.Random(3)
    side, context = a_side(max_kept=200, lease=60.0), a_context(lambda: rng.random() * 0.002)

    async def one():
        await asyncio.sleep(rng.random() * 0.5)
        task = asyncio.create_task(routes._prefill(context, side, BODY, {}))
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ApiError):
            side.release((await task).id, wanted=True)  # it was quicker

    await asyncio.gather(*(one() for _ in range(200)))
    await until(lambda: not side.kept and not context.engine.commands)
    assert side.stats.begun > 50


async def test_a_prompt_that_is_not_computed_in_time_is_given_up(no_prompt):
    side, context = a_side(lease=60.0), a_context(lambda: 0.05)
    late = BODY.model_copy(update={"seconds": 0.15})
    with pytest.raises(ApiError, match="in time") as error:
        await routes._prefill(context, side, late, {})
    assert error.value.status == 503
    await asyncio.sleep(0.4)
    assert side.kept == 0


async def test_a_lease_does_not_run_out_while_its_prompt_is_computed(no_prompt):
    side, context = a_side(lease=0.2, max_lease=60.0), a_context(lambda: 0.1)  # half a second for the prompt
    working = asyncio.create_task(routes._prefill(context, side, BODY, {}))
    expired = 0
    while not working.done():
        expired += side.sweep()
        await asyncio.sleep(0.01)
    assert not expired
    assert side.kept == 1
    await until(side.sweep)  # the state is not needed any more
    assert side.kept == 0


def test_a_lease_is_finite_from_the_start_and_renewed_up_to_a_limit():
    side, now = a_side(lease=10.0, max_lease=25.0, max_kept=2), [0.0]
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
