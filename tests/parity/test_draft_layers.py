"""The draft layer of Alibaba's models against a forward in plain torch (`golden/qwen_drafts.py`)."""

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.layout import SequenceLayout
from tests.support.golden_case import TO_HUGGING_FACE

CASES = ("qwen3next", "qwen35", "qwen35-moe")


def test_draft_layer_agrees_with_plain_torch(case):
    tokens = jnp.asarray(case.prompts[4])

    @jax.jit
    def drafts(model, tokens):
        layout = SequenceLayout.of(1, len(tokens))
        hidden, _ = model.hidden(tokens, layout, None)
        # Entry i + 1 is of the pair (hidden state i, token i + 1); there is no pair at index 0.
        out, _ = model.draft(tokens, jnp.roll(hidden, 1, axis=0), layout, None)
        return jax.nn.log_softmax(model.draft_logits(out))[1:]

    got = np.asarray(drafts(case.model, tokens))
    positions, ids, expected = case.expected_drafts
    assert np.abs(np.take_along_axis(got[positions], ids, axis=1) - expected).max() <= TO_HUGGING_FACE
