"""One decode worker goes on from a state that another one happens to hold."""

import json
import time
from unittest import mock

import httpx
import pytest

from serving.core.tiers.journal import Resumable
from serving.split.decode_side import PEER, DecodeSide
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.router.event_followers import EventFollowers, Stream
from serving.split.router.placement import PromptMatch, Tokens
from serving.split.router.relay import Relay
from serving.split.settings import SplitSettings
from serving.split.wire import ShareRequest, SplitError, Ticket
from tests.support.fleets.split_pair import Pair, assert_as_alone, build, output_of, tokens, worker
from tests.support.servers.fake_workers import Workers, all_of, asked, fleet_of, slow


class Replicas(Pair):
    """Two engines that do everything; the second goes on from what the first has."""

    def __init__(self, mode="all"):
        first, second = (worker(build(mode)) for _ in range(2))
        self.connect(PrefillSide(first, SplitSettings(role="decode", max_kept=2)), DecodeSide(second))

    def lend(self, prompt, beyond=0, salt=None) -> Ticket:
        return self.prefill_side.share(ShareRequest(tokens=prompt, beyond=beyond, salt=salt))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["all", "align"])
def test_what_another_replica_computed_is_not_computed_again(mode):
    replicas = Replicas(mode)
    for seed, length, more in ((1, 37, 9), (2, 48, 1), (3, 40, 0)):
        output_of(replicas.prefill, tokens(seed, length))
        prompt = tokens(seed, length + more)
        ticket = replicas.lend(prompt)
        assert ticket.position == length
        output = output_of(replicas.decode, prompt, remote=replicas.remote(ticket))
        assert output.num_cached_tokens == length
        assert_as_alone(prompt, output, (mode, seed))
        # The one that lent it still has it.
        again = output_of(replicas.prefill, prompt)
        assert again.num_cached_tokens >= length
        assert_as_alone(prompt, again, (mode, seed, "lender"))
    assert replicas.decode_side.stats.arrived == 3
    assert replicas.decode.loop.scheduler.fetch_costs.per_byte[PEER] > 0
    replicas.assert_idle()


def test_what_is_gone_or_too_many_is_refused():
    replicas = Replicas()
    output_of(replicas.prefill, tokens(1, 37), cache_salt="mine")
    with pytest.raises(SplitError, match="no cached state"):
        replicas.lend(tokens(1, 40))
    with pytest.raises(SplitError, match="no cached state"):
        replicas.lend(tokens(1, 40), salt="mine", beyond=37)
    ticket = replicas.lend(tokens(1, 40), salt="mine")
    replicas.lend(tokens(1, 40), salt="mine", beyond=36)
    with pytest.raises(TooMany):
        replicas.lend(tokens(1, 40), salt="mine")
    replicas.prefill_side.release(ticket.id, wanted=False)
    replicas.prefill.loop.scheduler.change_weights()
    with pytest.raises(SplitError, match="weights"):
        replicas.lend(tokens(1, 40), salt="mine")
    replicas.prefill_side.settings = replicas.prefill_side.settings.model_copy(update={"lease": 0.0})
    for export in replicas.prefill_side._kept.values():
        export.deadline = 0.0
    assert replicas.prefill_side.sweep() == 1
    replicas.assert_idle()


def test_a_state_that_does_not_come_costs_a_wait_and_no_more():
    """Released meanwhile, and lost with the lender's store."""
    replicas = Replicas()
    replicas.decode_side.settings = SplitSettings(on_failure="fail")  # for prompts that are computed for this worker
    for seed in (1, 2):
        output_of(replicas.prefill, tokens(seed, 37))
        prompt = tokens(seed, 45)
        ticket = replicas.lend(prompt)
        if seed == 1:
            replicas.prefill_side.release(ticket.id, wanted=False)
        else:
            replicas.prefill.loop._forget()
        assert_as_alone(prompt, output_of(replicas.decode, prompt, remote=replicas.remote(ticket)), seed)
    assert replicas.decode_side.stats.failed == 2
    replicas.assert_idle()


def test_it_is_fetched_only_where_that_is_cheaper():
    replicas = Replicas()
    output_of(replicas.prefill, tokens(1, 37))
    ticket = replicas.lend(tokens(1, 40))
    assert replicas.decode_side.worth_fetching(ticket), "nothing is known yet"
    prices = replicas.decode.loop.scheduler.fetch_costs
    prices.per_token = None
    prices.computed(1000, 0.001)
    prices.fetched(PEER, 1, 1.0)
    assert not replicas.decode_side.worth_fetching(ticket)
    prices.per_byte[PEER] = 1e-12
    assert replicas.decode_side.worth_fetching(ticket)
    output_of(replicas.decode, tokens(1, 37))
    assert not replicas.decode_side.worth_fetching(ticket), "it is here already"
    replicas.decode.loop.scheduler.change_weights()
    assert not replicas.decode_side.worth_fetching(ticket)
    assert replicas.decode_side.stats.dearer == 2
    replicas.prefill_side.release(ticket.id, wanted=False)


def test_lending_takes_memory_only_where_it_is_asked_for():
    plain, lending = (SplitSettings.create(role="decode", share=share).engine_flags for share in (False, True))
    assert lending["reserved_bytes"] == 2 * plain["reserved_bytes"]


PROMPT = list(range(40))
TICKET = Ticket(id="t", worker="http://a", handoff="full", prompt_token_ids=PROMPT, position=30, lease=9.0, shared=True)
SHARED = httpx.Response(200, json=TICKET.model_dump())


def sharing(share=SHARED, **more):
    """Workers that answer so to the router's requests for states."""
    answers = {"/split/share": share} | {f"/split/{name}": answer for name, answer in more.items()}
    return Workers(a=answers, b=answers)


async def answered(workers, busy=9, states=((30, "device"), None), weights=(0, 0), more=None, **settings):
    """A request where `a` has a deep state and is busy, and `b` has none; seconds that it took."""
    fleet = fleet_of(workers, ("a", "b"), **{"share_above": 16, "share_timeout": 0.3} | settings)
    following = EventFollowers(fleet)
    for each, count in zip(fleet.decode, weights, strict=True):
        following._streams[each] = Stream(each, None, count, "same")
    relay = Relay(fleet, following)
    known = {
        each: Resumable(0, state[0], frozenset([state[1]]))
        for each, state in zip(fleet.decode, states, strict=True) if state is not None
    }  # fmt: skip
    relay.placement.look = mock.AsyncMock(return_value=PromptMatch(known, len(PROMPT), Tokens(tokens=PROMPT)))
    fleet.decode[0].load = busy
    begin = time.monotonic()
    answer = await relay.answer(asked("completions", {"prompt": PROMPT} | (more or {})))
    content = b"".join(await all_of(answer.body))
    return json.loads(content)["from"], relay.stats, time.monotonic() - begin


async def test_a_busy_workers_state_is_fetched_by_another():
    workers = sharing()
    host, stats, _ = await answered(workers)
    assert workers.asked == [("a", "/split/share"), ("b", "/split/expect"), ("b", "/v1/completions")]
    share, expect = (json.loads(request.content) for request in workers.requests[:2])
    assert share["beyond"] == 0
    assert 0 < expect["patience"] <= 0.3
    assert (host, stats.shared, stats.split, stats.alone) == ("b", 1, 0, 1)


@pytest.mark.parametrize("what", [
    {"share_above": None}, {"share_above": 31}, {"busy": 0}, {"states": ((30, "host"), None)},
    {"states": ((30, "device"), (20, "device"))}, {"weights": (0, 1)}, {"weights": (1, 1)},
    {"more": {"prompt_logprobs": 1}},
])  # fmt: skip
async def test_no_worker_is_asked_for_a_useless_state(what):
    workers = sharing()
    await answered(workers, **what)
    assert not workers.paths("/split/share")


LYING = httpx.Response(200, json=TICKET.model_copy(update={"prompt_token_ids": [1, 2]}).model_dump())
GONE, MISMATCH = (httpx.Response(status, json={}) for status in (410, 409))
DEARER = httpx.Response(200, json={"accepted": False})


@pytest.mark.parametrize(("answers", "released"), [
    ({"share": slow(60)}, False), ({"share": LYING}, False), ({"share": GONE}, False),
    ({"expect": DEARER}, True), ({"expect": MISMATCH}, True), ({"expect": slow(60)}, True),
])  # fmt: skip
@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_whatever_goes_wrong_the_worker_computes(answers, released, policy):
    workers = sharing(**answers)
    host, stats, seconds = await answered(workers, on_failure=policy)
    assert (host, stats.shared, stats.alone) == ("b", 0, 1)
    assert seconds < 5
    assert (("a", "/split/release") in workers.asked) == released
