"""Outputs with prefill and decode apart are those of one engine, whatever is cached where."""

import numpy as np
import pytest

from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import finish
from tests.support.fleets.split_pair import DRAFTERS, GREEDY, B, Pair, assert_as_alone, build, output_of, tokens
from tests.support.selection import slow

LENGTHS = (1, 2, B - 1, B, B + 1, 3 * B + 5)


@pytest.mark.smoke
@pytest.mark.parametrize("source", ["none", "ngram", "mtp"])
@pytest.mark.parametrize("mode", ["all", "none", "align"])
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "source", "lengths"),
    [
        # Keys and values in 8 bits travel as they are; where rows are rounded, states travel wide.
        ({"kv_cache_dtype": "fp8"}, "mtp", (B - 1, 2 * B + 3)),
        ({"checkpoint_dtype": "int8"}, "none", (B - 1, 2 * B + 3, 3 * B)),
    ],
)
def test_what_is_narrow_gives_what_one_engine_with_the_same_flags_says(flags, source, lengths):
    pair = Pair("all", source, prefill=flags, decode=flags)
    dtypes = {str(spec.dtype) for spec in pair.prefill_side.worker.state.values()}
    assert "checkpoint_dtype" not in flags or dtypes == {"float32"}
    for length in lengths:
        prompt = tokens(length, length)
        one = output_of(build("none", **flags).engine, prompt)
        for handoff in ("full", "recompute-last"):
            assert pair.run(prompt, handoff).outputs[0].token_ids == one.outputs[0].token_ids
    pair.assert_idle()
    assert pair.decode_side.stats.failed == 0


@pytest.mark.full
@pytest.mark.parametrize("source", ["mtp", *DRAFTERS])
def test_a_drafter_drafts_from_what_arrived_as_from_what_was_computed_here(source):
    pair, alone = Pair("all", source), build("all", source).engine
    for length in LENGTHS:
        for handoff in ("full", "recompute-last"):
            prompt = tokens(length, length)
            assert pair.run(prompt, handoff).outputs[0].token_ids == output_of(alone, prompt).outputs[0].token_ids
            drafts = [np.asarray(engine.loop._rows.drafts) for engine in (pair.decode, alone)]
            np.testing.assert_array_equal(*drafts, err_msg=f"{length} {handoff}")
    assert pair.decode_side.stats.failed == 0
    pair.assert_idle()


TWO, MEMBERS = {"tensor_parallel_size": 2}, {"context_parallel_size": 2}


@pytest.mark.full
@pytest.mark.parametrize(("prefill", "decode"), [(MEMBERS, TWO), (TWO, MEMBERS)], ids=["members to 2", "2 to members"])
def test_numbers_of_devices_may_differ(prefill, decode):
    """One side divides heads over two devices, the other has two members: states go by logical arrays."""
    pair = Pair("all", prefill=prefill, decode=decode)
    assert {side.worker.manifest.shards for side in (pair.prefill_side, pair.decode_side)} == {1, 2}
    for length in (1, B, 2 * B + 3):
        for seed, handoff in enumerate(("full", "recompute-last")):
            prompt = tokens(10 * length + seed, length)
            assert_as_alone(prompt, pair.run(prompt, handoff), (length, handoff))
    assert pair.decode_side.stats.arrived == 5
    pair.assert_idle()


FLAGS = {"enable_structured_outputs": True, "adaptive_drafts": False}
STRUCTURED = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"regex": "(abcab){4}"})
ASKED = [(tokens(5, 2 * B + 3), STRUCTURED), (tokens(6, B), GREEDY), (tokens(7, B - 1), GREEDY)]


@pytest.mark.full
@pytest.mark.parametrize("source", [slow("ngram"), "mtp"])
def test_a_row_under_a_grammar_and_plain_ones_with_drafts(source):
    """They say what one engine without drafts says."""
    plain = build("none", enable_structured_outputs=True).engine
    expected = [plain.add_request(str(i), {"prompt_token_ids": ids}, params) for i, (ids, params) in enumerate(ASKED)]
    finish(plain)
    for handoff in ("full", "recompute-last"):
        pair = Pair("all", source, decode=FLAGS)
        outputs = [pair.add(ids, pair.compute(ids, handoff), params) for ids, params in ASKED]
        finish(pair.decode)
        assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]
        assert pair.decode_side.stats.failed == 0
        assert pair.decode_side.stats.arrived == len(ASKED)
        pair.assert_idle()
    assert outputs[0].metrics.drafts.drafted
