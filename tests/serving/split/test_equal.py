"""Outputs with prefill and decode apart are those of one engine, whatever is cached where."""

import pytest

from tests.support.split_pair import B, Pair, assert_as_alone, tokens

LENGTHS = (1, 2, B - 1, B, B + 1, 3 * B + 5)


@pytest.mark.parametrize("source", ["none", "ngram", "mtp"])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_tokens_are_those_of_one_engine(mode, source):
    """Both handoffs and all lengths: cold, then with hits on the prefill side, on the decode side, on both."""
    for handoff in ("full", "recompute-last"):
        for length in LENGTHS:
            prompt = tokens(length, length)
            what = (mode, source, handoff, length)
            pair = Pair(mode, source)
            assert_as_alone(prompt, pair.run(prompt, handoff), (*what, "cold"))
            warm = pair.prefill_side.stats.sent_bytes
            assert_as_alone(prompt, pair.run(prompt, handoff), (*what, "both"))
            if mode != "none" and handoff == "full":
                assert pair.prefill_side.stats.sent_bytes == warm, (*what, "nothing left to send")
            pair.assert_idle()
            assert pair.decode_side.stats.failed == 0
