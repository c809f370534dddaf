"""Against Hugging Face in this very process: other random weights than the fixtures', saved by it and loaded by us.

Needs the `parity` extra; without it these tests are skipped.
"""

import dataclasses

import numpy as np
import pytest
from golden.recipes import RECIPES

from checkpoints import load_model
from tests.support.models.golden_case import TO_HUGGING_FACE, full_log_probs

pytestmark = pytest.mark.parity

SEED = 77


@pytest.fixture(scope="module")
def oracle():
    pytest.importorskip("torch", reason="torch is not installed: needs the parity extra")
    pytest.importorskip("transformers", reason="transformers is not installed: needs the parity extra")
    from golden import oracle

    return oracle


# Models that Hugging Face can save as they are.
@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if recipe.mlp_sizes is None and not recipe.modules]
)
def test_agrees_with_hugging_face(name, oracle, tmp_path):
    recipe = dataclasses.replace(RECIPES[name], seed=SEED)
    theirs = oracle.build(recipe)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype="float32", progress=False)
    generator = np.random.default_rng(SEED)
    prompts = [generator.integers(0, recipe.config["vocab_size"], n) for n in (1, 2, recipe.chunk_size + 1, 150)]
    for prompt, got in zip(prompts, full_log_probs(ours, prompts), strict=True):
        assert np.abs(got - oracle.log_probs(theirs, prompt.tolist()).numpy()).max() <= TO_HUGGING_FACE
