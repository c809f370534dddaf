"""One side on two devices, the other on one: states go by logical arrays, and the tokens are the same."""

import pytest

from tests.support.split_pair import B, Pair, assert_as_alone, tokens

TWO = {"tensor_parallel_size": 2, "debug_state": True}


@pytest.mark.slow
@pytest.mark.parametrize("sides", [{"prefill": TWO}, {"decode": TWO}], ids=["2 to 1", "1 to 2"])
def test_tokens_are_those_of_one_engine(sides):
    pair = Pair("all", **sides)
    shards = {side.worker.manifest.shards for side in (pair.prefill_side, pair.decode_side)}
    assert shards == {1, 2}
    for length in (1, B, 2 * B + 3):
        for seed, handoff in enumerate(("full", "recompute-last")):
            prompt = tokens(10 * length + seed, length)
            assert_as_alone(prompt, pair.run(prompt, handoff), (length, handoff))
    assert pair.decode_side.stats.arrived == 5
    pair.assert_idle()
