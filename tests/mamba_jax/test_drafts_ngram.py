"""N-gram drafts against their definition in plain Python, and through the steps."""

import jax
import numpy as np
import pytest

from mamba_jax.drafts import NGramDrafts
from mamba_jax.drafts.ngram import look_up
from tests.support.fleets.step_host import Host, greedy
from tests.support.models.tiny_configs import STEP

WIDTH = 24


def by_definition(tokens, count, min_n, max_n):
    """The longest n first, then the latest occurrence; what follows it, going on with the same period."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                extended = list(tokens)
                for i in range(count):
                    extended.append(extended[end + i])
                return extended[len(tokens) :]
    return [-1] * count


@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (2, 4), (3, 3)], ids=str)
def test_look_up_equals_the_definition(bounds):
    rng = np.random.default_rng(1)
    rows, lengths = [], []
    for _ in range(300):
        length = int(rng.integers(0, WIDTH + 1))
        row = rng.integers(0, rng.integers(1, 6), WIDTH)
        row[length:] = rng.choice([-1, 0])  # what lies past the end must not matter
        rows.append(row)
        lengths.append(length)
    run = jax.jit(look_up, static_argnames=("count", "min_n", "max_n"))
    ours = run(np.array(rows, np.int32), np.array(lengths), count=4, min_n=bounds[0], max_n=bounds[1])
    for row, length, drafts in zip(rows, lengths, np.asarray(ours).tolist(), strict=True):
        assert drafts == by_definition(row[:length].tolist(), 4, *bounds), (row, length)


def test_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match="n-grams of 3 to 2 tokens"):
        NGramDrafts(3, 2)


@pytest.mark.full
def test_a_seat_knows_its_tokens_and_steps_add_to_them():
    host = Host(source=NGramDrafts(1, 3))
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
    want = greedy(prompt, 8)
    # What follows is in the prompt's beginning, which is never fed by these steps: it was found in the cache.
    known = [*want[:3], *want[:2], *prompt[5:]]
    host.seat(2, tokens=known)
    host.prefill({"row_id": 1, "tokens": prompt, "write": 1, "sample": False})
    host.decode({"row_id": 2, "c": 13, "read": 1, "tokens": [], "writes": [], "table": host.table(0)})
    history = np.asarray(host.rows.source[2])
    assert history[:14].tolist() == [*known, want[0]]
    assert (history[14:] == -1).all()
    assert (np.asarray(host.rows.source[1]) == -1).all()
    assert np.asarray(host.rows.drafts[2]).tolist() == by_definition([*known, want[0]], 3, 1, 3)
    made = 0
    emitted = [want[0]]
    for _ in range(3):
        out = host.decode({"row_id": 2, "continues": True, "drafts": 3, "writes": [2, 3, 4, 5], "table": host.table(0)})
        made += int(out.num_drafts[0])
        emitted += [t for t in out.tokens[0].tolist() if t >= 0]
        assert np.asarray(host.rows.source[2])[: 13 + len(emitted)].tolist() == known + emitted
        assert np.asarray(host.rows.drafts[2]).tolist() == by_definition(known + emitted, 3, 1, 3)
    assert emitted == greedy(prompt, len(emitted))
    assert made > 0
    # The next tenant starts from nothing.
    host.seat(2, tokens=[4])
    assert (np.asarray(host.rows.source[2])[1:] == -1).all()
