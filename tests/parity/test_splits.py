"""However a prompt is cut into steps, the distribution after each piece is that of the whole sequence."""

import numpy as np
import pytest

from tests.support.engines.prompt_stepper import TILE
from tests.support.models.golden_case import TO_OURSELVES


def _halves(length, generator):
    return [length // 2, length - length // 2] if length > 1 else [length]


def _odd_pieces(length, generator):
    size = TILE + 5
    return [size] * (length // size) + [length % size] * (length % size > 0)


def _random_pieces(length, generator):
    cuts = sorted(set(generator.integers(1, length, 5).tolist())) if length > 1 else []
    return np.diff([0, *cuts, length]).tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("split", [_halves, _odd_pieces, _random_pieces])
def test_split_prefill_equals_the_whole(case, stepper, split):
    generator = np.random.default_rng(7)
    pieces = {row: split(len(prompt), generator) for row, prompt in enumerate(case.prompts)}
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
