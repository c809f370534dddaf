"""What either side holds for the other is bounded: in time, in number and in bytes."""

from unittest import mock

import pytest

from serving.split.prefill_side import TooMany
from serving.split.wire import SplitTimeout, StateRequest
from tests.support.engines.engines import finish
from tests.support.fleets.split_pair import B, Pair, assert_as_alone, tokens

PROMPT = tokens(1, 3 * B + 5)


def want_of(pair, ticket):
    worker = pair.decode_side.worker
    return StateRequest(
        id=ticket.id, start=0, unit=worker.manifest.page_size, layers=worker.manifest.attention_layers,
        transport="direct", manifest=pair.prefill_side.worker.manifest.digest,
    )  # fmt: skip


def test_leases_run_out():
    """Held or copied, nothing stays; who comes too late computes the prompt."""
    pair = Pair("all")
    now = [0.0]
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
    output = pair.add(PROMPT, held)
    finish(pair.decode)
    assert_as_alone(PROMPT, output)
    assert pair.decode_side.stats.failed == 1
    pair.assert_idle()


def test_states_of_requests_that_wait_for_a_seat_are_not_let_go():
    now = [0.0]
    pair = Pair("all", decode={"max_num_seqs": 2})
    pair.prefill_side._clock = lambda: now[0]
    renewed, renew = set(), pair.peer.renew
    pair.peer.renew = lambda ids: renewed.update(ids) or renew(ids)
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
    assert len(renewed) == len(prompts)
    pair.assert_idle()


def test_copies_are_capped_in_bytes():
    pair = Pair("all")
    pair.prefill_side.max_copied_bytes = pair.state_bytes
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
    pair, offer = Pair("all"), mock.Mock(side_effect=SplitTimeout("no answer"))
    pair.peer.offer = offer
    for i in range(4):
        prompt = tokens(50 + i, B + 3)
        assert_as_alone(prompt, pair.run(prompt))
    assert offer.call_count == 1
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
