"""A row under a grammar and plain ones, all with drafts, whose prompts another worker has computed."""

import pytest

from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines import finish
from tests.support.selection import slow
from tests.support.split_pair import GREEDY, B, Pair, build, tokens

FLAGS = {"enable_structured_outputs": True, "adaptive_drafts": False}
STRUCTURED = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs={"regex": "(abcab){4}"})
ASKED = [(tokens(5, 2 * B + 3), STRUCTURED), (tokens(6, B), GREEDY), (tokens(7, B - 1), GREEDY)]


@pytest.mark.full
@pytest.mark.parametrize("source", [slow("ngram"), "mtp"])
def test_each_says_what_one_engine_without_drafts_says(source):
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
