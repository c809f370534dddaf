"""What is sent, what is spared, and what happens when something goes wrong."""

import random
from unittest import mock

import numpy as np
import pytest

from serving.core.cache.retention import Mark
from serving.split.http.roles import prepare
from serving.split.settings import SplitSettings
from serving.split.wire import SplitError
from serving.state_transfer.programs import PointPrograms
from tests.support.engines.engines import finish
from tests.support.fleets.split_pair import GREEDY, B, DelayedExecutor, Pair, assert_as_alone, output_of, tokens

PROMPT = tokens(1, 3 * B + 5)


def waiting(steps=3):
    """A pair, an executor that waits to be told, and a request that has waited for its state for some steps."""
    later = DelayedExecutor(random.Random(0))
    pair = Pair("all", executor=later)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    run_some(pair.decode, steps)
    return pair, later, output


def run_some(engine, steps=3):
    for _ in range(steps):
        engine.step()


@pytest.mark.smoke
@pytest.mark.parametrize("handoff", ["full", "recompute-last"])
@pytest.mark.parametrize("warm", ["both", "prefill", "decode"])
def test_hits_of_a_shorter_prefix(warm, handoff):
    """Local pages are not sent again; what the two sides know may differ, and what comes out does not."""
    pair = Pair("all")
    for engine, name, length in ((pair.prefill, "prefill", 2 * B + 3), (pair.decode, "decode", B + 9)):
        if warm in (name, "both"):
            output_of(engine, PROMPT[:length])
    before = pair.decode.loop.scheduler.stats()["prefill_tokens"]
    output = pair.run(PROMPT, handoff)
    assert_as_alone(PROMPT, output)
    assert pair.decode.loop.scheduler.stats()["prefill_tokens"] == before + (handoff == "recompute-last")
    stats = pair.decode_side.stats
    assert stats.arrived == 1
    assert (stats.pages_spared > 0) == (warm != "prefill")
    assert (output.num_cached_tokens > 0) == (warm != "decode")
    pair.assert_idle()


def test_marks_keep_states_where_a_prompt_is_computed_and_are_counted():
    pair, place = Pair("all"), B + 3
    output = pair.run(PROMPT, ticket=pair.compute(PROMPT, marks=(Mark(place, 300.0),)))
    assert_as_alone(PROMPT, output)
    assert output.cache_write_tokens == {300.0: place}
    assert pair.compute([*PROMPT[:place], *tokens(2, 9)]).cached_tokens == place


def test_pages_there_and_state_not():
    """One state is sent, and no page."""
    pair = Pair("all")
    output_of(pair.decode, PROMPT)
    index = pair.decode.loop.scheduler.index
    while index.evict_state():
        pass
    assert_as_alone(PROMPT, pair.run(PROMPT))
    stats = pair.decode_side.stats
    # The last, partly filled page went with its state.
    assert (stats.arrived, stats.pages) == (1, 1)
    whole = PROMPT[: 2 * B]
    while index.evict_state():
        pass
    before = pair.decode_side.stats.received_bytes
    assert_as_alone(whole, pair.run(whole))
    assert stats.pages == 1
    assert stats.received_bytes - before == pair.state_bytes
    pair.assert_idle()


@pytest.mark.full
@pytest.mark.parametrize(("there", "here"), [(4, 16), (16, 4)])
def test_page_sizes_may_differ(there, here):
    pair = Pair("all", prefill={"page_size": there}, decode={"page_size": here})
    for length in (1, B, 2 * B + 7):
        assert_as_alone(PROMPT[:length], pair.run(PROMPT[:length]), length)
    longer = [*PROMPT[: 2 * B + 7], 5, 6]
    assert_as_alone(longer, pair.run(longer))
    assert pair.decode_side.stats.pages_spared > 0
    pair.assert_idle()


@pytest.mark.parametrize("when", ["queued", "waiting", "arrived"])
def test_aborts_let_go_on_both_sides(when):
    pair, later, output = waiting(0)
    assert pair.prefill_side.stats.held == 1
    run_some(pair.decode, 0 if when == "queued" else 3)
    if when == "arrived":
        later.run()
    pair.decode.abort(output.request_id)
    for _ in range(5):
        pair.decode.step()
        later.run()
    finish(pair.decode)
    assert pair.decode_side.stats.arrived == 0
    pair.assert_idle()


def test_what_comes_late_is_not_written():
    """Its slot and pages are another's by then."""
    pair, later, output = waiting()
    function, arguments = later.jobs.pop()
    pair.decode.abort(output.request_id)
    other = pair.decode.add_request("other", {"prompt_token_ids": tokens(9, 50)}, GREEDY)
    run_some(pair.decode, 2)
    function(*arguments)
    later.run()
    finish(pair.decode)
    assert_as_alone(tokens(9, 50), other)
    assert pair.decode_side.stats.late == 1
    later.run()
    pair.assert_idle()


INJECTED = mock.Mock(side_effect=SplitError("injected: no answer"))


def failing_offer(pair):
    pair.peer.offer = INJECTED


def failing_fetch(pair):
    (transport,) = pair.decode_side.worker.transports.values()
    transport.fetch = INJECTED


def _changing(change):
    """A fault that changes the arrays that were fetched."""

    def plant(pair):
        (transport,) = pair.decode_side.worker.transports.values()
        fetch = transport.fetch
        transport.fetch = lambda *arguments: change([np.array(array) for array in fetch(*arguments)])

    return plant


half = _changing(lambda arrays: arrays[:-1])
damaged = _changing(lambda arrays: [arrays[0] + (np.arange(arrays[0].size) == 3).reshape(arrays[0].shape), *arrays[1:]])


def others_state(pair):
    """The wrong length: one token fewer than was promised."""
    offer = pair.peer.offer
    pair.peer.offer = lambda *asked: offer(*asked).model_copy(update={"position": len(PROMPT) - 1})


FAULTS = [failing_offer, failing_fetch, damaged, half, others_state]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_arrive_is_computed_here(fault):
    pair = Pair("all")
    fault(pair)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    pair.decode.step()
    assert pair.decode.loop.scheduler.stats()["pages_published"] == 0
    finish(pair.decode)
    assert_as_alone(PROMPT, output)
    assert (pair.decode_side.stats.failed, pair.decode_side.stats.arrived) == (1, 0)
    pair.assert_idle()


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_or_fails_its_request(fault):
    pair = Pair("all", settings=SplitSettings(on_failure="fail"))
    fault(pair)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    seen = []
    while pair.decode.loop.busy:
        seen += pair.decode.step()
    assert output in seen
    assert output.outputs[0].finish_reason == "error"
    assert "injected" in output.outputs[0].stop_reason
    pair.decode.loop.scheduler.check(idle=True)
    assert pair.decode.num_unfinished == 0


def test_attaching_a_neighbor_changes_no_hit():
    counted = []
    for attached in (False, True):
        engine = Pair("all").decode
        if not attached:
            engine.loop.sources.clear()
        for length in (40, 40, 20, 3 * B, 3 * B + 5):
            output_of(engine, PROMPT[:length])
        counted.append(engine.loop.scheduler.stats())
    assert counted[0] == counted[1]


def test_a_roles_warm_up_is_all_it_needs():
    pair = Pair("all")
    for side, reads in ((pair.prefill_side, True), (pair.decode_side, False)):
        side.worker.programs = PointPrograms(side.worker.arrangement)
        prepare(side.worker, reads)
    programs = [side.worker.programs for side in (pair.prefill_side, pair.decode_side)]
    before = [len(each.cache) for each in programs]
    assert before == [5, 5]
    for length in (1, 7, 45, 69):
        assert_as_alone(tokens(length, length), pair.run(tokens(length, length)))
    assert [len(each.cache) for each in programs] == before
