"""What is sent, what is spared, what is let go, and what happens when something goes wrong."""

import dataclasses

import numpy as np
import pytest

from serving.points.point import PointPrograms
from serving.split.http.roles import OpenRole
from serving.split.prefill_side import TooMany
from serving.split.wire import SplitError, SplitTimeout, Want
from tests.support.engines import finish
from tests.support.split_pair import GREEDY, B, Pair, assert_as_alone, tokens

PROMPT = tokens(1, 3 * B + 5)


class Later:
    """An executor that waits to be told."""

    def __init__(self):
        self.jobs = []

    def submit(self, function, *arguments):
        self.jobs.append((function, arguments))

    def run(self):
        jobs, self.jobs = self.jobs, []
        for function, arguments in jobs:
            function(*arguments)


def run_some(engine, steps=3):
    for _ in range(steps):
        engine.step()


def state_bytes(pair):
    return sum(int(np.prod(spec.shape)) * spec.dtype.itemsize for spec in pair.decode_side.worker.state.values())


@pytest.mark.parametrize("handoff", ["full", "recompute-last"])
@pytest.mark.parametrize("warm", ["prefill", "decode", "both"])
def test_hits_of_a_shorter_prefix(warm, handoff):
    """Local pages are not sent again; what the two sides know may differ, and what comes out does not."""
    pair = Pair("all")
    for engine, name, length in ((pair.prefill, "prefill", 2 * B + 3), (pair.decode, "decode", B + 9)):
        if warm in (name, "both"):
            engine.add_request(f"warm-{name}", {"prompt_token_ids": PROMPT[:length]}, GREEDY)
            finish(engine)
    output = pair.run(PROMPT, handoff)
    assert_as_alone(PROMPT, output)
    stats = pair.decode_side.stats
    assert stats.arrived == 1
    assert (stats.pages_spared > 0) == (warm != "prefill")
    assert (output.num_cached_tokens > 0) == (warm != "decode")
    pair.assert_idle()


def test_pages_there_and_state_not():
    """One state is sent, and no page."""
    pair = Pair("all")
    pair.decode.add_request("warm", {"prompt_token_ids": PROMPT}, GREEDY)
    finish(pair.decode)
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
    assert stats.received_bytes - before == state_bytes(pair)
    pair.assert_idle()


def test_nothing_left_to_send():
    pair = Pair("all")
    pair.decode.add_request("warm", {"prompt_token_ids": PROMPT}, GREEDY)
    finish(pair.decode)
    assert_as_alone(PROMPT, pair.run(PROMPT))
    assert pair.prefill_side.stats.sent_bytes == 0
    assert (pair.decode_side.stats.arrived, pair.decode_side.stats.spared) == (0, 1)
    pair.assert_idle()


@pytest.mark.parametrize(("there", "here"), [(4, 16), (16, 4)])
def test_page_sizes_may_differ(there, here):
    pair = Pair("all", prefill={"page_size": there}, decode={"page_size": here})
    for length in (1, B, 2 * B + 7):
        assert_as_alone(PROMPT[:length], pair.run(PROMPT[:length]), length)
    longer = [*PROMPT[: 2 * B + 7], 5, 6]
    assert_as_alone(longer, pair.run(longer))
    assert pair.decode_side.stats.pages_spared > 0
    pair.assert_idle()


def test_full_handoff_computes_nothing_here():
    pair = Pair("all")
    ticket = pair.compute(PROMPT)
    before = pair.decode.loop.scheduler.stats()["prefill_tokens"]
    pair.add(PROMPT, ticket)
    finish(pair.decode)
    assert pair.decode.loop.scheduler.stats()["prefill_tokens"] == before
    pair.run(tokens(2, 40), "recompute-last")
    assert pair.decode.loop.scheduler.stats()["prefill_tokens"] == before + 1


def test_full_handoff_and_reuse():
    """A second prompt is computed over there before the first one's state is fetched."""
    pair = Pair("all")
    prompts = PROMPT, tokens(3, 2 * B)
    tickets = [pair.compute(prompt) for prompt in prompts]
    for prompt, ticket in zip(prompts, tickets, strict=True):
        output = pair.add(prompt, ticket)
        finish(pair.decode)
        assert_as_alone(prompt, output)
    assert pair.decode_side.stats.arrived == 2
    pair.assert_idle()


def test_seeded_draws_and_choices_are_those_without_a_split():
    params = dataclasses.replace(GREEDY, temperature=0.9, seed=5, n=3)
    pair = Pair("all", "ngram")
    alone = pair.decode.add_request("alone", {"prompt_token_ids": PROMPT}, params, cache_salt="other")
    finish(pair.decode)
    split = pair.run(PROMPT, params=params)
    assert [choice.token_ids for choice in split.outputs] == [choice.token_ids for choice in alone.outputs]
    pair.assert_idle()


def test_drafts_after_a_split_are_as_good():
    """What the draft layer keeps of the prompt travels too: it is that of an engine that has computed the prompt."""
    kept = []
    for split in (False, True):
        pair = Pair("all", "mtp")
        if split:
            output = pair.add(PROMPT, pair.compute(PROMPT))
        else:
            output = pair.decode.add_request("alone", {"prompt_token_ids": PROMPT}, GREEDY)
        while not output.outputs[0].token_ids:
            pair.decode.step()
        (request,) = pair.decode.loop.scheduler.running
        kv = np.asarray(pair.decode.loop.store.kv[-1])
        # Index 0 has no pair.
        kept.append(kv[request.progress.pages.table].reshape(-1, *kv.shape[2:])[1 : len(PROMPT)])
        finish(pair.decode)
    assert np.abs(kept[0]).min(axis=(1, 2)).max() > 0
    np.testing.assert_allclose(kept[1], kept[0], atol=1e-5)


def test_nothing_is_found_before_it_has_arrived():
    later = Later()
    pair = Pair("all", executor=later)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    run_some(pair.decode)
    twin = pair.decode.add_request("twin", {"prompt_token_ids": PROMPT}, GREEDY)
    run_some(pair.decode)
    assert twin.num_cached_tokens == 0
    later.run()
    finish(pair.decode)
    later.run()
    for each in (output, twin):
        assert_as_alone(PROMPT, each)
    pair.assert_idle()


@pytest.mark.parametrize("when", ["queued", "waiting", "arrived"])
def test_aborts_let_go_on_both_sides(when):
    later = Later()
    pair = Pair("all", executor=later)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    assert pair.prefill_side.stats.held == 1
    if when != "queued":
        run_some(pair.decode)
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
    later = Later()
    pair = Pair("all", executor=later)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    run_some(pair.decode)
    job = later.jobs.pop()
    pair.decode.abort(output.request_id)
    other = pair.decode.add_request("other", {"prompt_token_ids": tokens(9, 50)}, GREEDY)
    run_some(pair.decode, 2)
    function, arguments = job
    function(*arguments)
    later.run()
    finish(pair.decode)
    assert_as_alone(tokens(9, 50), other)
    assert pair.decode_side.stats.late == 1
    later.run()
    pair.assert_idle()


def failing_offer(pair):
    def refuse(want, seconds):
        raise SplitError("injected: no answer")

    pair.peer.offer = refuse


def failing_fetch(pair):
    (transport,) = pair.decode_side.worker.transports.values()
    transport.fetch = lambda *_: (_ for _ in ()).throw(SplitError("injected: the connection broke"))


def damaged(pair):
    (transport,) = pair.decode_side.worker.transports.values()
    fetch = transport.fetch

    def damage(*arguments):
        arrays = [np.array(array) for array in fetch(*arguments)]
        arrays[0].reshape(-1)[3] += 1
        return arrays

    transport.fetch = damage


def half(pair):
    (transport,) = pair.decode_side.worker.transports.values()
    fetch = transport.fetch
    transport.fetch = lambda *arguments: fetch(*arguments)[:-1]


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
    published = pair.decode.loop.scheduler.stats()["pages_published"]
    assert published == 0
    finish(pair.decode)
    assert_as_alone(PROMPT, output)
    assert (pair.decode_side.stats.failed, pair.decode_side.stats.arrived) == (1, 0)
    pair.assert_idle()


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_or_fails_its_request(fault):
    pair = Pair("all", policy="fail")
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


def test_leases_run_out():
    """Held or copied, nothing stays; who comes too late computes the prompt."""
    pair = Pair("all")
    now = [0.0]
    side = pair.prefill_side
    side._clock = lambda: now[0]
    held, copied = pair.compute(PROMPT), pair.compute(tokens(4, 40))
    peer = pair.peer
    (name, transport) = next(iter(side.worker.transports.items()))
    digest = side.worker.manifest.digest
    peer.offer(Want(id=copied.id, start=0, unit=8, layers=1, transport=name, manifest=digest), 9.0)
    assert (side.stats.held, side.stats.copies, side.stats.copied_bytes > 0) == (1, 1, True)
    now[0] = 29.0
    assert side.sweep() == 0
    now[0] = 31.0
    assert side.sweep() == 2
    assert side.stats.expired == 2
    assert not transport.offered
    output = pair.add(PROMPT, held)
    finish(pair.decode)
    assert_as_alone(PROMPT, output)
    assert pair.decode_side.stats.failed == 1
    pair.assert_idle()


def test_no_more_are_kept_than_may_be():
    pair = Pair("all")
    pair.prefill_side.max_kept = 2
    tickets = [pair.compute(tokens(i, 20)) for i in range(2)]
    with pytest.raises(TooMany, match="2 states wait"):
        pair.compute(tokens(5, 20))
    for ticket in tickets:
        pair.peer.release(ticket.id, wanted=False)
    pair.compute(tokens(5, 20))


def test_a_lost_store_over_there():
    pair = Pair("all")
    ticket = pair.compute(PROMPT)
    pair.prefill.loop._forget()
    output = pair.add(PROMPT, ticket)
    finish(pair.decode)
    assert_as_alone(PROMPT, output)
    assert pair.prefill_side.stats.lost == 1
    pair.assert_idle()


def test_a_lost_store_here():
    later = Later()
    pair = Pair("all", executor=later)
    output = pair.add(PROMPT, pair.compute(PROMPT))
    run_some(pair.decode)
    pair.decode.loop._forget()
    later.run()
    finish(pair.decode)
    later.run()
    assert_as_alone(PROMPT, output)
    pair.assert_idle()


def test_preempted_while_it_waits():
    """Who waits holds pages that an earlier request may need: then it computes its prompt itself, later."""
    later = Later()
    pair = Pair("all", executor=later)
    _, pool = pair.decode.loop.scheduler.pools
    away = [pool.take() for _ in range(26)]
    long = dataclasses.replace(GREEDY, max_tokens=50)
    first = pair.decode.add_request("first", {"prompt_token_ids": tokens(8, 30)}, long)
    run_some(pair.decode, 2)
    waits = pair.add(PROMPT[:40], pair.compute(PROMPT[:40]))
    for _ in range(300):
        if first.finished:
            break
        pair.decode.step()
    assert first.finished
    assert pair.decode.loop.scheduler.stats()["preemptions"] == 1
    later.run()
    finish(pair.decode)
    later.run()
    assert_as_alone(PROMPT[:40], waits)
    for page in away:
        pool.release(page)
    pair.assert_idle()


def test_attaching_a_neighbour_changes_no_hit():
    counted = []
    for attached in (False, True):
        engine = Pair("all").decode
        if not attached:
            engine.loop.connector = None
        for i, length in enumerate((40, 40, 20, 3 * B, 3 * B + 5)):
            engine.add_request(f"{i}", {"prompt_token_ids": PROMPT[:length]}, GREEDY)
            finish(engine)
        counted.append(engine.loop.scheduler.stats())
    assert counted[0] == counted[1]


def test_after_a_warm_up_nothing_compiles():
    pair = Pair("all")
    pair.run(PROMPT)
    pair.run(tokens(11, 17))
    programs = [side.worker.programs for side in (pair.prefill_side, pair.decode_side)]
    before = [each.compilations for each in programs]
    for seed, length in enumerate((1, 2, 9, 50, 70)):
        pair.run(tokens(20 + seed, length), "recompute-last" if seed % 2 else "full")
    assert [each.compilations for each in programs] == before


def test_a_roles_warm_up_is_all_it_needs():
    pair = Pair("all")
    for side, reads in ((pair.prefill_side, True), (pair.decode_side, False)):
        side.worker.programs = PointPrograms(side.worker.arrangement)
        OpenRole([], side.worker, reads=reads, writes=not reads).prepare()
    programs = [side.worker.programs for side in (pair.prefill_side, pair.decode_side)]
    before = [each.compilations for each in programs]
    assert before == [5, 5]
    for length in (1, 7, 45, 69):
        assert_as_alone(tokens(length, length), pair.run(tokens(length, length)))
    assert [each.compilations for each in programs] == before


# -- bounds --


class Remembering:
    """A peer that notes what it is told."""

    def __init__(self, peer):
        self._peer, self.renewed = peer, []

    def __getattr__(self, name):
        return getattr(self._peer, name)

    def renew(self, ids):
        self.renewed += ids
        self._peer.renew(ids)


def test_states_of_requests_that_wait_for_a_seat_are_not_let_go():
    now = [0.0]
    pair = Pair("all", decode={"max_num_seqs": 2})
    pair.prefill_side._clock = lambda: now[0]
    pair.peer = Remembering(pair.peer)
    prompts = [tokens(20 + i, B + i) for i in range(8)]
    tickets = [pair.compute(prompt) for prompt in prompts]
    outputs = [pair.add(prompt, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
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
    assert len(set(pair.peer.renewed)) == len(prompts)
    pair.assert_idle()


def test_copies_are_capped_in_bytes():
    pair = Pair("all")
    pair.prefill_side.max_copied_bytes = state_bytes(pair)
    first, second = (pair.compute(tokens(30 + i, B + 3)) for i in range(2))
    pair.prefill_side.offer(want_of(pair, first))
    with pytest.raises(TooMany, match="bytes wait to be fetched"):
        pair.prefill_side.offer(want_of(pair, second))
    assert pair.prefill_side.kept == 2, "it can be asked for again"
    pair.prefill_side.release(first.id, wanted=True)
    pair.prefill_side.offer(want_of(pair, second))
    pair.prefill_side.release(second.id, wanted=False)
    pair.assert_idle()


def want_of(pair, ticket):
    worker = pair.decode_side.worker
    return Want(
        id=ticket.id, start=0, unit=worker.manifest.page_size, layers=worker.manifest.attention_layers,
        transport="direct", manifest=pair.prefill_side.worker.manifest.digest,
    )  # fmt: skip


def test_arrivals_wait_for_room_and_not_for_ever():
    pair = Pair("all", timeout=0.2)
    side = pair.decode_side
    side._arriving = side._max_arriving
    prompt = tokens(40, B + 3)
    output = pair.run(prompt)
    assert_as_alone(prompt, output)
    assert (side.stats.arrived, side.stats.failed) == (0, 1)
    side._arriving = 0
    assert_as_alone(tokens(41, B), pair.run(tokens(41, B)))
    assert side.stats.arrived == 1
    assert side._arriving == 0
    pair.assert_idle()


def test_who_does_not_answer_is_not_asked_by_the_next_ones():
    class Silent(Remembering):
        asked = 0

        def offer(self, want, seconds):
            self.asked += 1
            raise SplitTimeout("no answer")

    pair = Pair("all")
    pair.peer = Silent(pair.peer)
    for i in range(4):
        prompt = tokens(50 + i, B + 3)
        assert_as_alone(prompt, pair.run(prompt))
    assert pair.peer.asked == 1
    assert pair.decode_side.stats.failed == 4
    pair.assert_idle()


def test_a_request_that_has_waited_long_enough_waits_no_more():
    pair = Pair("all")
    ticket = pair.compute(tokens(60, B + 3)).model_copy(update={"patience": 1e-9})
    output = pair.add(tokens(60, B + 3), ticket)
    finish(pair.decode)
    assert_as_alone(tokens(60, B + 3), output)
    assert pair.decode_side.stats.failed == 1
    pair.prefill_side.release(ticket.id, wanted=False)
    pair.assert_idle()
