"""Hugging Face's log-probabilities and greedy tokens, by whole sequences and by real steps.

However a prompt is cut into steps, the distribution after each piece is that of the whole sequence.
"""

import numpy as np
import pytest

from tests.support.engines.prompt_stepper import TILE, TOP
from tests.support.models.golden_case import CLEAR_GAP, TO_HUGGING_FACE, TO_OURSELVES, draft_log_probs

CASES = {"test_draft_layer_agrees_with_other_code": ("qwen3next", "qwen35", "qwen35-moe", "ling3")}


def test_fixtures_are_small(case):
    assert sum(path.stat().st_size for path in case.directory.iterdir()) <= 1 << 20


def test_whole_sequences_agree_with_hugging_face(case):
    for prompt, full in enumerate(case.full):
        positions, ids, expected = case.expected(prompt)
        assert np.abs(np.take_along_axis(full[positions], ids, axis=1) - expected).max() <= TO_HUGGING_FACE


@pytest.mark.smoke
def test_draft_layer_agrees_with_other_code(case):
    """Of Alibaba's models with a forward in plain torch, of Ling 3.0 with transformers' own."""
    got = draft_log_probs(case.model, case.prompts[4])
    positions, ids, expected = case.expected_drafts
    assert np.abs(np.take_along_axis(got[positions], ids, axis=1) - expected).max() <= TO_HUGGING_FACE


@pytest.mark.smoke
def test_one_packed_prefill_agrees_with_hugging_face(case, stepper):
    _, written = stepper.prefill({row: len(prompt) for row, prompt in enumerate(case.prompts)}, every_tile=True)
    got = dict(zip(written, stepper.log_probs(list(written.values())), strict=True))
    for prompt in range(len(case.prompts)):
        for position, ids, expected in zip(*case.expected(prompt), strict=True):
            if (prompt, position + 1) in got:
                assert np.abs(got[prompt, position + 1][ids] - expected).max() <= TO_HUGGING_FACE
        assert (prompt, len(case.prompts[prompt])) in got
    # Every tile's end is a point to resume from, its hidden state included.
    assert all(np.abs(told - case.full[row][end - 1]).max() <= TO_OURSELVES for (row, end), told in got.items())


@pytest.mark.smoke
def test_prompt_log_probabilities_of_a_prefill(case, stepper):
    output, _ = stepper.prefill({row: len(prompt) for row, prompt in enumerate(case.prompts)})
    start = 0
    for prompt, full in zip(case.prompts, case.full, strict=True):
        at = slice(start + 1, start + len(prompt))  # a sequence's first token has none
        reported = output.prompt_logprobs
        assert np.abs(reported.token[at] - full[np.arange(len(prompt) - 1), prompt[1:]]).max(initial=0) <= TO_OURSELVES
        top = np.take_along_axis(full[:-1], reported.top_ids[at], axis=1)
        assert np.abs(reported.top[at] - top).max(initial=0) <= TO_OURSELVES
        assert np.abs(reported.top[at] + np.sort(-full[:-1], axis=1)[:, :TOP]).max(initial=0) <= TO_OURSELVES
        start += len(prompt)


def test_greedy_continuations(case, stepper):
    output, _ = stepper.prefill({row: len(prompt) for row, prompt in enumerate(case.prompts)})
    rows = list(range(len(case.prompts)))
    tokens = [output.tokens[:, 0]]
    for _ in range(15):
        tokens.append(stepper.decode(rows).tokens[:, 0])
    for row in rows:
        expected, gaps = case.greedy(row)
        clear = next((i for i, gap in enumerate(gaps) if gap < CLEAR_GAP), len(gaps))
        assert [int(step[row]) for step in tokens][:clear] == expected[:clear]


PIECE = TILE + 5
SPLITS = {
    "halves": lambda n, _: [n // 2, n - n // 2] if n > 1 else [n],
    "odd pieces": lambda n, _: [PIECE] * (n // PIECE) + [n % PIECE] * (n % PIECE > 0),
    "random pieces": lambda n, random: np.diff(sorted({0, *random.integers(1, n, 5), n})) if n > 1 else [n],
}


@pytest.mark.smoke
@pytest.mark.parametrize("split", SPLITS)
def test_split_prefill_equals_the_whole(case, stepper, split):
    generator = np.random.default_rng(7)
    pieces = {row: SPLITS[split](len(prompt), generator) for row, prompt in enumerate(case.prompts)}
    for turn in range(max(map(len, pieces.values()))):
        _, written = stepper.prefill({row: sizes[turn] for row, sizes in pieces.items() if turn < len(sizes)})
        for (row, end), got in zip(written, stepper.log_probs(list(written.values())), strict=True):
            assert np.abs(got - case.full[row][end - 1]).max() <= TO_OURSELVES, (row, end)
    assert stepper.length == [len(prompt) for prompt in case.prompts]


@pytest.mark.smoke
def test_decoding_token_by_token_equals_prefill(case, stepper):
    # The first token is never a decode row. The longest prompt is prefilled but for as many tokens as a chunk has.
    steps = sorted(map(len, case.prompts))[-2]
    stepper.prefill({row: max(1, len(prompt) - steps) for row, prompt in enumerate(case.prompts)})
    while rows := [row for row, prompt in enumerate(case.prompts) if stepper.length[row] < len(prompt)]:
        output = stepper.decode(rows)
        got = stepper.log_probs([stepper.slot[row] for row in rows])
        for j, row in enumerate(rows):
            expected = case.full[row][stepper.length[row] - 1]
            assert np.abs(got[j] - expected).max() <= TO_OURSELVES, (row, stepper.length[row])
            assert abs(output.logprobs[j, 0] - expected.max()) <= TO_OURSELVES
