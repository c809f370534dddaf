"""Draft layers against other code: of Alibaba's models a forward in plain torch, of Ling 3.0 transformers' own."""

import numpy as np

from tests.support.models.golden_case import TO_HUGGING_FACE, draft_log_probs

CASES = ("qwen3next", "qwen35", "qwen35-moe", "ling3")


def test_draft_layer_agrees_with_other_code(case):
    got = draft_log_probs(case.model, case.prompts[4])
    positions, ids, expected = case.expected_drafts
    assert np.abs(np.take_along_axis(got[positions], ids, axis=1) - expected).max() <= TO_HUGGING_FACE
