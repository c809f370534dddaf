"""Sampling against a numpy definition that sorts, loops and knows one row at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.sampling import choose, draw_tokens, report_logprobs, sampling_row
from mamba_jax.sampling.draw_tokens import categorical
from mamba_jax.sampling.logits import add_bias, penalize, truncate, weights_of
from mamba_jax.sampling.table import _key as key_of
from tests.support.sampling import asked_of, table_of
from tests.support.stored_jit import late

VOCAB = 300  # more than one block of those that argmax and draws go through, and no whole number of them


@partial(late, static_argnames="supports")
def chosen(logits, table, supports=False, **given):
    return choose(logits, asked_of(table, logits.shape, **given), supports=supports)


def run(logits, rows, *, length=0, supports=False, **given):
    given = {name: np.asarray(value) for name, value in given.items()}
    lengths = np.full(len(logits), length, np.int32)
    return chosen(jnp.asarray(logits, jnp.float32), table_of(*rows), supports, length=lengths, **given)


def reference(logits, *, output_index=0, counts=None, seen=None, **p):
    """What is left of one row's logits [vocab] after everything that parameters `p` ask for."""
    x = np.array(logits, np.float64)
    for token, value in (p.get("logit_bias") or {}).items():
        x[token] += value
    if output_index < p.get("min_tokens", 0):
        x[list(p["stop_ids"])] = -np.inf
    counts = np.zeros(len(x), int) if counts is None else np.asarray(counts)
    seen = np.zeros(len(x), bool) if seen is None else np.asarray(seen)
    for token in range(len(x)):
        if counts[token] or seen[token]:
            factor = p.get("repetition_penalty", 1)
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        x[token] -= p.get("frequency_penalty", 0) * counts[token]
        x[token] -= p.get("presence_penalty", 0) * (counts[token] > 0)
    x /= p.get("temperature", 0) or 1
    probability = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    x[probability < p.get("min_p", 0) * probability.max()] = -np.inf
    if p.get("top_k"):
        x[x < np.sort(x)[-min(p["top_k"], len(x))]] = -np.inf
    if p.get("top_p", 1) < 1:
        probability = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
        order = np.argsort(-probability, kind="stable")
        before = np.cumsum(probability[order]) - probability[order]
        x[order[before >= p["top_p"]]] = -np.inf
    return x


def probabilities(x):
    x = np.exp(x - x.max())
    return x / x.sum()


ROWS = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 0: -100.0}, "min_tokens": 4, "stop_ids": [1, 22]},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_k": 500},
]


@late
def processed(logits, table, index, counts, seen, drafts):
    logits = penalize(add_bias(logits, table, index), table, counts, seen, drafts)
    return truncate(weights_of(logits, table.temperature), table)


def test_processors_equal_the_definition():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(len(ROWS), 2, VOCAB)).astype(np.float32) * 3
    counts = rng.integers(0, 3, (len(ROWS), VOCAB))
    seen = rng.random((len(ROWS), VOCAB)) < 0.3
    drafts = rng.integers(0, VOCAB, (len(ROWS), 1))
    table = table_of(*ROWS).take(jnp.arange(1, len(ROWS) + 1))
    index = jnp.array([3, 4])[None].repeat(len(ROWS), 0)
    got = np.asarray(processed(logits, table, index, counts, seen, drafts))
    for i, p in enumerate(ROWS):
        for head in range(2):
            # Head 1 stands after the draft, which penalties count as output.
            count = counts[i] + (head == 1) * (np.arange(VOCAB) == drafts[i, 0])
            want = reference(logits[i, head], output_index=3 + head, counts=count, seen=seen[i], **p)
            weights = np.exp(want - want.max())  # what float32 cannot hold weighs nothing
            np.testing.assert_array_equal(got[i, head] > 0, weights > 1e-37, err_msg=str(p))
            np.testing.assert_allclose(got[i, head], weights, rtol=1e-4, atol=1e-37, err_msg=str(p))


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "want"),
    [
        ([4, 5, 6], 3, [4, 5, 6, 7]),  # all right: the bonus token comes after them
        ([4, 9, 6], 3, [4, 5, -1, -1]),  # what follows a wrong draft does not count, right or not
        ([9, 5, 6], 3, [4, -1, -1, -1]),
        ([-1, 5, 6], 3, [4, -1, -1, -1]),
        ([4, 5, 6], 1, [4, 5, -1, -1]),
        ([4, 5, 6], 0, [4, -1, -1, -1]),
    ],
)
def test_greedy_verification(drafts, num_drafts, want):
    logits = np.eye(VOCAB)[[4, 5, 6, 7]][None]
    # The same, whether or not a random batch-mate sends the batch down the general path.
    for mate in ({}, {"temperature": 1.0, "top_p": 0.5}):
        both = np.repeat(logits, 2, 0)
        out = run(both, [{}, mate], drafts=[drafts] * 2, num_drafts=[num_drafts] * 2)
        np.testing.assert_array_equal(out.tokens[0], want)
        emitted = sum(t >= 0 for t in want)
        assert (int(out.count[0]), int(out.accepted[0])) == (emitted, emitted - 1)


def test_a_seeded_row_does_not_depend_on_its_batch_mates():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(40, 1, VOCAB))
    rows = [{"temperature": 1.0, "seed": i, "prompt_length": 7} for i in range(40)]
    out = np.asarray(run(logits, rows, length=11).tokens)[:, 0]
    again = [3, 17, 0, 3] * 10
    part = run(logits[again], rows, length=11, row_id=[i + 1 for i in again]).tokens[:, 0]
    np.testing.assert_array_equal(part, out[again])
    # The position that counts is the output's: a longer prompt changes nothing.
    longer = [{**row, "prompt_length": 9} for row in rows]
    np.testing.assert_array_equal(run(logits, longer, length=13).tokens[:, 0], out)
    # All 64 bits of a seed count, and the choice.
    seen = set()
    for seed in (5, 2**32 + 5, 2**63 + 5):
        one, other = ([{**row, "seed": seed, "choice": choice} for row in rows] for choice in (0, 1))
        seen |= {tuple(run(logits, each, length=11).tokens[:, 0].tolist()) for each in (one, other)}
    assert len(seen) == 6
    assert (np.asarray(run(logits, rows, length=12).tokens)[:, 0] != out).any()


def chi_square(tokens, want):
    """The statistic over its 0.999 quantile (normal approximation): below 1 is a pass."""
    have = np.bincount(tokens, minlength=len(want))
    assert (have[want == 0] == 0).all()
    expected = want[want > 0] * len(tokens)
    statistic, free = ((have[want > 0] - expected) ** 2 / expected).sum(), (want > 0).sum() - 1
    return statistic / (free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3)


def test_draws_are_distributed_as_they_should():
    samples, rng = 20_000, np.random.default_rng(5)
    logits = rng.normal(size=VOCAB) * 2
    logits[rng.random(VOCAB) < 0.4] = -np.inf
    logits[128:256] = -np.inf
    keys = np.stack([key_of(seed, 0) for seed in range(samples)])
    draw = jax.jit(
        lambda keys, weights: categorical(keys, jnp.zeros((samples, 1), int), jnp.tile(weights, (samples, 1, 1)))
    )
    tokens = np.asarray(draw(keys, np.exp(logits).astype(np.float32)))[:, 0]
    want = probabilities(logits)
    assert (want[tokens] > 0).all()
    likely = want > 10 / samples
    rest = (np.bincount(tokens, minlength=VOCAB)[~likely].sum(), want[~likely].sum() * samples)
    assert abs(rest[0] - rest[1]) < 5 * np.sqrt(rest[1])
    tokens = tokens[likely[tokens]]
    assert chi_square(tokens, np.where(likely, want, 0) / want[likely].sum()) < 1


EVERYTHING = {"top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "top_k": 7}


@pytest.mark.smoke
@pytest.mark.parametrize(("num_drafts", "parameters"), [(3, {}), (3, EVERYTHING), (1, EVERYTHING)])
def test_drafts_leave_the_distribution_as_it_was(num_drafts, parameters):
    samples, vocab, width = 20_000, 8, 1 + num_drafts
    rng = np.random.default_rng(3)
    logits, counts = rng.normal(size=(width, vocab)) * 0.7, rng.integers(0, 2, vocab)
    seen = rng.random(vocab) < 0.5
    parameters = {"temperature": 0.8, **parameters}
    want, drafts, after = [], np.zeros(width - 1, int), counts.copy()
    for head in range(width):
        want.append(probabilities(reference(logits[head], counts=after, seen=seen, **parameters)))
        if head < width - 1:
            drafts[head] = np.argsort(want[head])[-2]  # likely, but far from certain
            after[drafts[head]] += 1
    table = jax.tree.map(lambda v: jnp.repeat(jnp.asarray(v)[None], samples, 0), sampling_row(**parameters))
    keys = np.stack([key_of(seed, 0) for seed in range(samples)])
    table = dataclasses.replace(table, key=jnp.asarray(keys))
    out = chosen(
        jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (samples, width, vocab)),
        table,
        drafts=jnp.broadcast_to(jnp.asarray(drafts), (samples, width - 1)),
        row_id=jnp.arange(samples),
        output_counts=jnp.broadcast_to(jnp.asarray(counts), (samples, vocab)),
        prompt_seen=jnp.broadcast_to(jnp.asarray(seen), (samples, vocab)),
    )
    # Seat 0 is a row like any other here.
    tokens, emitted = np.asarray(out.tokens), np.asarray(out.count)
    for head in range(width):
        there = emitted > head
        assert chi_square(tokens[there, head], want[head]) < 1, f"head {head}, {there.sum()} samples"
        # Acceptance is as likely as the draft is.
        if head < width - 1:
            rate, p = (emitted[there] > head + 1).mean(), want[head][drafts[head]]
            assert abs(rate - p) < 4 * np.sqrt(p * (1 - p) / there.sum()) + 1e-9


def test_the_most_likely_of_many_with_ties():
    # Blocks with equal maxima, and more of the same value within them than are asked for: the first of equals.
    logits = np.random.default_rng(6).integers(0, 4, (2, 5000)).astype(np.float32)
    logits[1, 1000:] -= 9
    for most in (20, 70):
        reported = jax.jit(partial(report_logprobs, most=most))(logits, np.zeros(2, int), np.full(2, most))
        _, ids, top, _ = reported
        np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :most])
        assert (np.diff(top) <= 0).all()


def test_rows_have_room_for_so_much():
    for message, row in (
        ("301 entries of logit_bias: at most 300", {"logit_bias": dict.fromkeys(range(301), 1.0)}),
        ("65 ids that min_tokens must hold back: at most 64", {"min_tokens": 1, "stop_ids": range(65)}),
        ("1025 logprobs: at most 1024", {"logprobs": 1025}),
        ("token id -3: ids from 0 on", {"logit_bias": {-3: 1.0}}),
        ("129 ids of prompt_logprob_token_ids: at most 128", {"prompt_logprobs": 0, "prompt_logprob_ids": range(129)}),
    ):
        with pytest.raises(ValueError, match=message):
            sampling_row(**row)


def test_processed_log_probabilities_are_of_what_tokens_are_drawn_from():
    rng = np.random.default_rng(5)
    logits, counts = rng.normal(size=(3, 1, VOCAB)).astype(np.float32), rng.integers(0, 2, VOCAB)
    rows = [
        {"temperature": 0.6, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.7, "presence_penalty": 1.0, "logit_bias": {3: 4.0}},
        {"presence_penalty": 2.0, "frequency_penalty": 0.5},
    ]
    seats = jnp.asarray(np.tile(counts, (4, 1)), jnp.int32)
    asked = asked_of(table_of(*rows), logits.shape, output_counts=seats)
    for row, parameters in enumerate(rows):
        left = reference(logits[row, 0], counts=counts, **parameters)
        token = int(left.argmax())
        given = report_logprobs(logits, np.full((3, 1), token, np.int32), np.full((3, 1), 5), asked.processed)
        with np.errstate(divide="ignore"):
            wanted = np.log(probabilities(left))
        np.testing.assert_allclose(given[0][row, 0], wanted[token], atol=1e-4)
        np.testing.assert_allclose(given[2][row, 0, :5], np.sort(wanted)[::-1][:5], atol=1e-4)


LIMITS = [
    # 8 are sorted: another may have the weight of the eighth.
    {"top_k": 1}, {"top_k": 7}, {"top_k": 8}, {"top_k": 30}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 1e-6},
    {"top_k": 5, "top_p": 0.7}, {"top_k": 40, "top_p": 0.95, "min_p": 0.02}, {"min_p": 0.1},
    {"min_p": 0.3, "top_k": 6}, {},
]  # fmt: skip


def test_limits_found_among_the_largest_logits_are_those_of_all_logits(monkeypatch):
    """With 8 logits sorted, some heads of each kind are decided by them and others are not; tokens are the same."""
    monkeypatch.setattr(draw_tokens, "FEW", 8)
    rng = np.random.default_rng(7)
    heads, found = 2, []
    rows = [
        {"temperature": t, "seed": 11 * i, "sampling_mask": True, **p} for t in (0.3, 1.0) for i, p in enumerate(LIMITS)
    ]
    count, table = len(rows), table_of(*rows)

    @jax.jit
    def both(logits, length):
        asked = asked_of(table, (count, heads, 1), drafts=jnp.full((count, heads - 1), -1), length=length)
        asked = dataclasses.replace(asked, supports=asked.random)
        decided = draw_tokens._by_cut(logits, asked, *draw_tokens._of_heads(asked))[2]
        return draw_tokens.draw_by_cut(logits, asked), draw_tokens.draw_in_turn(logits, asked), decided

    for step in range(12):
        logits = rng.normal(size=(count * heads, VOCAB)) * rng.choice([0.5, 3.0, 8.0], (count * heads, 1))
        if step % 3 == 0:
            logits = np.round(logits)  # many ties
        by_cut, in_turn, decided = both(jnp.asarray(logits, jnp.float32), jnp.full(count, step))
        for cut, searched in zip(by_cut, in_turn, strict=True):  # the tokens, and what they were drawn from
            np.testing.assert_array_equal(cut, searched)
        found.append(decided)
    assert 0.2 < np.mean(found) < 0.9


def drawable(x, temperature, **limits):
    """The tokens that `reference` keeps, and those with as large a logit."""
    kept = reference(x, temperature=temperature, **limits)
    return x >= x[kept > -np.inf].min()


@pytest.mark.parametrize("ties", [False, True])
def test_supports_are_the_tokens_that_can_be_drawn(ties):
    rng = np.random.default_rng(9)
    rows = [{"temperature": 0.7, "sampling_mask": True, **limits} for limits in LIMITS]
    rows += [{"sampling_mask": True}, {"temperature": 0.7, "top_k": 3, "sampling_mask": True, "logit_bias": {5: 20.0}}]
    logits = rng.normal(size=(len(rows), 2, VOCAB)) * 3
    logits = np.round(logits) if ties else logits
    drafts = logits[:, 0].argmax(axis=-1)[:, None]
    out = run(logits, rows, drafts=drafts, supports=True)
    found = np.unpackbits(np.asarray(out.supports), axis=-1, count=VOCAB, bitorder="little").astype(bool)
    assert out.supports.shape[-1] == -(-VOCAB // 8)
    for row, parameters in enumerate(rows):
        for head in range(int(out.count[row])):
            token, x = int(out.tokens[row, head]), logits[row, head].astype(np.float32).astype(np.float64)
            if parameters.get("logit_bias"):
                x[5] += 20
                assert found[row, head, 5]
            limits = {name: parameters[name] for name in ("top_k", "top_p", "min_p") if name in parameters}
            expected = drawable(x, 0.7, **limits) if "temperature" in parameters else np.arange(VOCAB) == x.argmax()
            np.testing.assert_array_equal(found[row, head], expected)
            assert found[row, head, token]
    assert (np.asarray(out.count) == 2).any()
    assert run(logits, rows, drafts=drafts).supports is None
