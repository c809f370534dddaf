"""Drafts: what is kept, where each state lands, and what the next step reads."""

import numpy as np
import pytest

from tests.support.fleets.step_host import Host, assert_holds, expected_logprobs, greedy
from tests.support.models.tiny_configs import VOCAB

PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 13))


def start(host=None, **sampling):
    """A host whose row 1 has its prompt absorbed and its first token sampled; that token and the three after it."""
    host = host or Host()
    if sampling:
        host.seat(1, **sampling)
    host.prefill({"tokens": PROMPT, "write": 1})
    return host, greedy(PROMPT, 5)


def wrong(token):
    return (token + 1) % VOCAB


@pytest.mark.parametrize("source", ["host", "seat"])
@pytest.mark.parametrize("right", [3, 2, 1, 0])
def test_every_state_lands_in_its_slot_and_the_next_step_reads_the_last_kept_one(right, source):
    """`right` drafts are right, the one after them is wrong, and what follows that is not looked at."""
    host, want = start()
    drafts = [t if j < right else wrong(t) for j, t in enumerate(want[1:4])]
    step = {"drafts": 3, "writes": [2, 3, 4, 5]}
    if source == "host":
        out = host.decode(step | {"tokens": [want[0], *drafts], "c": len(PROMPT), "read": 1})
    else:
        host.rows = host.with_drafts(1, drafts)
        out = host.decode(step | {"continues": True})
    assert out.tokens[0].tolist() == want[1 : right + 2] + [-1] * (3 - right)
    assert (out.num_emitted[0], out.kept[0]) == (right + 1, right + 1)
    fed = (*PROMPT, want[0], *drafts)
    for t in range(4):
        assert_holds(host, 2 + t, fed[: len(PROMPT) + t + 1])
    assert_holds(host, 1, PROMPT)
    assert int(host.rows.length[1]) == len(PROMPT) + right + 1
    assert int(host.rows.slot[1]) == 2 + right
    # Without drafts, the next step goes on from there; the read slot itself may be written.
    out = host.decode({"continues": True, "writes": [2 + right]})
    tokens = (*PROMPT, *want[: right + 2])
    assert_holds(host, 2 + right, tokens)
    assert out.tokens[0].tolist() == [greedy(tokens, 1)[0], -1, -1, -1]
    assert not out.tag_error


def test_missing_drafts_are_rejected_and_fewer_may_be_fed():
    host, want = start()
    mate = {"row_id": 2, "tokens": [want[0], want[1]], "drafts": 1, "c": len(PROMPT), "read": 1, "writes": [6, 7]}
    out = host.decode(
        {"tokens": [want[0], want[1], -1, want[3]], "drafts": 3, "c": len(PROMPT), "read": 1, "writes": [2, 3, 4, 5]},
        mate | {"table": shared_table(host, 1), "page_copy": (host.table(0)[3], host.table(1)[3])},
        {"row_id": 3, "tokens": [want[0]], "c": len(PROMPT), "read": 1, "writes": [8], "table": shared_table(host, 2)}
        | {"page_copy": (host.table(0)[3], host.table(2)[3])},
    )
    assert out.tokens[0].tolist() == [*want[1:3], -1, -1]
    assert out.tokens[1].tolist() == [*want[1:3], -1, -1]
    assert out.tokens[2].tolist() == [want[1], -1, -1, -1]
    assert out.kept[:3].tolist() == [2, 2, 1]
    assert host.rows.slot[1:4].tolist() == [3, 7, 8]


def shared_table(host, row):
    """Row 0's pages up to the one that its prompt ends in, which is the row's own."""
    table = host.table(row)
    table[:3] = host.table(0)[:3]
    return table


def test_certain_tokens_before_drafts_are_all_kept():
    """A tail of two certain tokens with two drafts."""
    host, want = start()
    tokens = [want[0], want[1], want[2], wrong(want[3])]
    out = host.decode({"tokens": tokens, "drafts": 2, "c": len(PROMPT), "read": 1, "writes": [2, 3, 4, 5]})
    assert out.tokens[0].tolist() == [want[2], want[3], -1, -1]
    assert (out.num_emitted[0], out.kept[0]) == (2, 3)
    assert int(host.rows.slot[1]) == 4
    assert_holds(host, 4, (*PROMPT, *want[:3]))


def test_unused_slots_are_not_written():
    host, want = start()
    host.decode({"tokens": want[:4], "drafts": 3, "c": len(PROMPT), "read": 1, "writes": [0, 3, 0, 5]})
    assert_holds(host, 3, (*PROMPT, *want[:2]))
    assert_holds(host, 5, (*PROMPT, *want[:4]))
    for untouched in (2, 4):
        assert np.isnan(host.slot(untouched)[0]).all()


def test_logprobs_of_accepted_drafts_and_of_the_token_after_them():
    host, want = start(logprobs=2)
    tokens = [want[0], want[1], wrong(want[2]), 0]
    out = host.decode({"tokens": tokens, "drafts": 3, "c": len(PROMPT), "read": 1, "writes": [2, 3, 4, 5]})
    expected = expected_logprobs((*PROMPT, *want[:3]))[-3:]
    for j in range(2):
        np.testing.assert_allclose(out.logprobs[0, j], expected[j, want[1 + j]], atol=1e-4)
        best = np.argsort(-expected[j])[:20]
        np.testing.assert_array_equal(out.top_ids[0, j], best)
        np.testing.assert_allclose(out.top_logprobs[0, j], expected[j, best], atol=1e-4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "random"])
def test_penalties_count_accepted_drafts_and_forget_rejected_ones(sampling):
    counts, seen = np.zeros(VOCAB, np.int32), np.zeros(VOCAB, bool)
    seen[list(PROMPT)] = True
    penalties = {"frequency_penalty": 0.1, "output_counts": counts, "prompt_seen": seen}
    host = Host()
    host.seat(1, **penalties, **sampling)
    first = int(host.prefill({"tokens": PROMPT, "write": 1}).tokens[0, 0])
    want = greedy((*PROMPT, first), 3)
    out = host.decode(
        {"tokens": [first, *want[:1], *map(wrong, want[1:])], "drafts": 3, "c": len(PROMPT), "read": 1}
        | {"writes": [2, 3, 4, 5]}
    )
    emitted = [first, *out.tokens[0][out.tokens[0] >= 0].tolist()]
    np.testing.assert_array_equal(host.rows.output_counts[1], np.bincount(emitted, minlength=VOCAB))


def test_drafts_do_not_change_what_a_penalized_greedy_row_says():
    """Draft j is judged with the drafts before it counted, as they would have been one step at a time."""
    counts, seen = np.zeros(VOCAB, np.int32), np.zeros(VOCAB, bool)
    strong = {"presence_penalty": 4.0, "repetition_penalty": 1.5, "output_counts": counts, "prompt_seen": seen}
    host = Host()
    host.seat(1, **strong)
    said = [int(host.prefill({"tokens": PROMPT, "write": 1}).tokens[0, 0])]
    for _ in range(7):
        said.append(int(host.decode({"continues": True, "writes": [1]}).tokens[0, 0]))
    host = Host()
    host.seat(1, **strong)
    host.prefill({"tokens": PROMPT, "write": 1})
    host.rows = host.with_drafts(1, said[1:4])
    out = host.decode({"continues": True, "drafts": 3, "writes": [2, 3, 4, 5]})
    assert out.tokens[0].tolist() == said[1:5]
    host.rows = host.with_drafts(1, [said[5], wrong(said[6]), said[7]])
    out = host.decode({"continues": True, "drafts": 3, "writes": [2, 3, 4, 5]})
    assert out.tokens[0].tolist() == [*said[5:7], -1, -1]
