"""Adapters that PEFT has saved, against transformers with PEFT: of all linear layers, with magnitudes, with tables."""

import jax
import numpy as np
import pytest
from golden.recipes import RECIPES

from checkpoints.adapters.adapter import read_adapter
from mamba_jax.adapters import Adapters, adaptable_layers
from mamba_jax.config import MLP, MOE
from mamba_jax.model import parameters
from tests.support.models.golden_case import FIXTURES, TO_HUGGING_FACE, Case, adapted_logits

ADAPTERS = sorted((path.parents[1].name, path.parent.name) for path in FIXTURES.glob("*/*/logprobs.npz"))
ALIKE = ("bamba", "dora"), ("lfm2", "saved")
"""Other models have such adapters, too."""
LATER = [(name, "adapter") for name, recipe in RECIPES.items() if recipe.steps != "default"]
MIXERS_ONLY = ("qwen3next-dense",)
"""See `golden/make_adapters.py`."""


@pytest.mark.parametrize(
    ("name", "folder"),
    [pytest.param(*each, marks=[pytest.mark.full] * (each in ALIKE or each in LATER)) for each in ADAPTERS],
)
def test_every_adapted_layer_says_what_peft_says(name, folder):
    case = Case(name)
    directory = case.directory / folder
    adapter = read_adapter(directory, case.model.config, max_rank=4)
    expected = adaptable_layers(case.model).keys()
    if name in MIXERS_ONLY:
        kinds = case.model.config.pattern
        expected = {path for path in expected if kinds[int(path.split(".")[1])] not in (MLP, MOE)}
    assert adapter.layers.keys() <= set(expected) if folder == "saved" else adapter.layers.keys() == set(expected)
    assert set(adapter.tables) == ({"embed", "lm_head"} if folder == "saved" else set())
    stacks = Adapters(case.model, count=1, rank=4, magnitudes=folder == "dora", tables=folder == "saved")
    values = {path: leaf[...] for path, leaf in parameters(case.model).items()}
    stacks.put(1, stacks.entry_of(adapter.layers, adapter.magnitudes, adapter.tables), values)
    run = adapted_logits(case.model, stacks, case.prompts[4][None], np.ones(1, np.int32))
    found = np.asarray(jax.nn.log_softmax(run(stacks.arrays)[0]))
    with np.load(directory / "logprobs.npz") as golden:
        positions, ids, expected = golden["positions"], golden["ids"], golden["logprobs"]
    own = np.take_along_axis(found[positions], ids.astype(int), axis=1)
    np.testing.assert_allclose(own, expected, atol=TO_HUGGING_FACE)
