"""Drafts, and rows held by an anchor and the inputs since: what is kept, where each state lands, what steps read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.fleets.step_host import Host, assert_holds, greedy
from tests.support.models.tiny_configs import VOCAB

PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 13))

FED = {"c": len(PROMPT), "read": 1, "writes": [2, 3, 4, 5]}
"""A row whose tokens come from the host, after its prompt."""


def start(host=None, count=5):
    """A host whose row 1 has absorbed the prompt in slot 1 and sampled a token; and what greedy goes on with."""
    host = host or Host()
    host.seat(1)
    host.prefill({"tokens": PROMPT, "write": 1})
    return host, greedy(PROMPT, count)


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


def test_certain_tokens_before_drafts_are_all_kept():
    """A tail of two certain tokens with two drafts."""
    host, want = start()
    out = host.decode(FED | {"tokens": [*want[:3], wrong(want[3])], "drafts": 2})
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


R = 8


def anchored():
    """The same of a host whose rows are held by an anchor and the inputs since."""
    return start(Host(interval=R), count=22)


def anchor(host):
    return int(host.rows.slot[1]), int(host.rows.anchor[1]), int(host.rows.length[1])


@pytest.mark.smoke
@pytest.mark.parametrize("rights", [[1, 0, 2, 3, 0, 1], [0], [3], [2, 3]], ids=str)
def test_outputs_and_anchors_are_those_of_snapshots(rights):
    """Drafts of which the first few are right, over several multiples of R; each state that lands is S(m)."""
    host, want = anchored()
    tokens, step = [*PROMPT, want[0]], 0
    spares = iter([2, 3, 4, 5])
    spare = next(spares)
    while len(tokens) < len(PROMPT) + len(want) - 4:
        at, right = len(tokens) - len(PROMPT), rights[step % len(rights)]
        drafts = [t if j < right else wrong(t) for j, t in enumerate(want[at : at + 3])]
        host.rows = host.with_drafts(1, drafts)
        before, (slot, a, c) = host.slot(spare), anchor(host)
        assert c == len(tokens) - 1
        out = host.decode({"continues": True, "drafts": 3, "writes": [spare]})
        assert out.tokens[0].tolist() == want[at : at + right + 1] + [-1] * (3 - right)
        m = (c // R + 1) * R
        if m <= c + 4:
            assert_holds(host, spare, [*tokens, *drafts][:m])
        else:
            jax.tree.map(np.testing.assert_array_equal, host.slot(spare), before)
        tokens += want[at : at + right + 1]
        step += 1
        moved = m <= c + 1 + right
        assert anchor(host) == ((spare, m, c + 1 + right) if moved else (slot, a, c + 1 + right))
        assert_holds(host, slot, tokens[:a])
        spare = next(spares) if moved else spare
        assert not out.tag_error


def test_the_host_may_name_anchor_and_tokens():
    """A row that does not continue: what the host says counts, and the tail is there."""
    host, want = anchored()
    host.decode({"continues": True, "writes": [2]})
    host.decode({"continues": True, "writes": [2]})
    step = {"tokens": [want[2], want[3]], "drafts": 1, "c": 15, "read": 1, "anchor": 13, "writes": [2]}
    assert host.decode(step).tokens[0].tolist() == [*want[3:5], -1, -1]
    assert anchor(host) == (2, 16, 17)
    assert_holds(host, 2, [*PROMPT, *want[:3]])


def test_a_row_may_write_over_its_own_anchor():
    """Without a spare. The token that reaches the multiple is certain."""
    host, want = anchored()
    for step in range(8):
        assert host.decode({"continues": True, "writes": [1]}).tokens[0, 0] == want[step + 1]
    assert anchor(host) == (1, 16, 21)
    assert_holds(host, 1, [*PROMPT, *want[:3]])


def test_wrong_anchors_and_tails_are_seen():
    def error(**change):
        host, _ = anchored()
        host.decode({"continues": True, "writes": [2]})
        rows = {name: getattr(host.rows, name).at[1].add(by) for name, by in change.items()}
        host.rows = dataclasses.replace(host.rows, **rows)
        return bool(host.decode({"continues": True, "writes": [2]}).tag_error)

    assert not error()
    assert error(anchor=-1)
    assert error(anchor=1)
    assert error(length=1)  # an entry that was never written
    assert error(slot=1)
    host, _ = anchored()
    host.decode({"continues": True, "writes": [0]})
    host.decode({"continues": True, "writes": [0]})
    assert host.decode({"continues": True, "writes": [0]}).tag_error  # a multiple of R, and nowhere to write


def test_nothing_beyond_what_counts_is_looked_at():
    """All else in the tails is NaN: other seats', rejected drafts', what lies before the anchor."""
    host, want = anchored()
    tails = host.store.tails
    for step in range(10):
        counts = np.zeros(tails.tags.shape, bool)
        _, a, c = anchor(host)
        counts[1, [n % counts.shape[1] for n in range(a, c)]] = True

        def spoil(ring, a=a, c=c, kept=counts):
            entries = ring.shape[1]
            last = np.zeros(ring.shape[:2], bool)
            last[1, [n % entries for n in range(max(a, c - 3), c)]] = True
            mask = kept if entries == kept.shape[1] else last
            return jnp.where(mask.reshape(*mask.shape, *[1] * (ring.ndim - 2)), ring, jnp.nan)

        tails = host.store.tails
        tails = dataclasses.replace(tails, layers=jax.tree.map(spoil, tails.layers))
        host.store = dataclasses.replace(host.store, tails=tails)
        out = host.decode({"continues": True, "writes": [2 + step]})
        assert out.tokens[0, 0] == want[step + 1]
        assert out.finite[0]
