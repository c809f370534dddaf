"""The draft layer of Alibaba's models against a forward in plain torch (`golden/qwen_drafts.py`)."""

import numpy as np

from tests.support.golden_case import TO_HUGGING_FACE, draft_log_probs

CASES = ("qwen3next", "qwen35", "qwen35-moe")


def test_draft_layer_agrees_with_plain_torch(case):
    got = draft_log_probs(case.model, case.prompts[4])
    positions, ids, expected = case.expected_drafts
    assert np.abs(np.take_along_axis(got[positions], ids, axis=1) - expected).max() <= TO_HUGGING_FACE
