"""Drafts, and rows held by an anchor and the inputs since: what is kept, where each state lands, what steps read."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.support.fleets.step_host import Host, assert_holds, greedy
from tests.support.models.tiny_configs import VOCAB

PROMPT = tuple(int(t) for t in np.random.default_rng(2).integers(0, VOCAB, 13))


def start(host=None, prompt=PROMPT, count=5, **sampling):
    """A host whose row 1 has absorbed its prompt in slot 1 and sampled a token; and what greedy goes on with."""
    host = host or Host()
    host.seat(1, **sampling)
    host.prefill({"tokens": prompt, "write": 1})
    return host, greedy(prompt, count)


def wrong(token):
    return (token + 1) % VOCAB


def test_unused_slots_are_not_written():
    host, want = start()
    host.decode({"tokens": want[:4], "drafts": 3, "c": len(PROMPT), "read": 1, "writes": [0, 3, 0, 5]})
    assert_holds(host, 3, (*PROMPT, *want[:2]))
    assert_holds(host, 5, (*PROMPT, *want[:4]))
    for untouched in (2, 4):
        assert np.isnan(host.slot(untouched)[0]).all()


R = 8


def anchored(host=None, **options):
    """The same of a host whose rows are held by an anchor and the inputs since."""
    return start(host or Host(interval=R), **{"count": 22} | options)


def anchor(host, row_id=1):
    return int(host.rows.slot[row_id]), int(host.rows.anchor[row_id]), int(host.rows.length[row_id])


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
