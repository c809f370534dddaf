"""A drafter over two devices, and on a model without attention."""

from functools import partial

import numpy as np
import pytest

from checkpoints.load import load_config
from serving import LLM
from tests.serving.engine.test_drafter import PARAMS, SIZES, prompts
from tests.support.divisible_checkpoints import FAMILIES, write_checkpoint
from tests.support.drafters import write_block, write_eagle
from tests.support.engine_harness import GOLDEN
from tests.support.selection import slow


def first_page(engine):
    """The drafter's keys and values of the first 8 tokens of the first prompt."""
    return np.asarray(engine.engine.loop.store.kv[-1])[1][1:]


@pytest.mark.full
@pytest.mark.parametrize(
    "write",
    [write_eagle, slow(partial(write_block, method="dspark"))],
    ids=["eagle3", "dspark"],
)
def test_two_devices(write, tmp_path):
    """Each has its own heads of the drafter."""
    model = write_checkpoint(tmp_path / "model", FAMILIES["nemotronh-moe"])
    target, flags = load_config(model), SIZES | {"tensor_parallel_size": 2}
    folder = str(write(tmp_path / "drafter", target))
    expected = [each.outputs[0].token_ids for each in LLM(str(model), **flags).generate(prompts(), PARAMS)]
    drafting = LLM(str(model), speculative_model=folder, adaptive_drafts=False, **flags)
    outputs = drafting.generate(prompts(), PARAMS)
    assert [each.outputs[0].token_ids for each in outputs] == expected
    alone = LLM(str(model), speculative_model=folder, adaptive_drafts=False, **SIZES)
    # The same drafts: as many are right.
    drafts = [one.engine.loop.stats.drafts for one in (drafting, alone)]
    alone.generate(prompts(), PARAMS)
    assert drafts[0].accepted_at == drafts[1].accepted_at
    np.testing.assert_allclose(*(first_page(one) for one in (drafting, alone)), atol=1e-4)


@pytest.mark.full
def test_a_model_without_attention_has_pages_for_its_drafter(tmp_path):
    model = GOLDEN.parent / "mamba2"
    folder = write_eagle(tmp_path / "eagle3", load_config(model))
    plain, drafting = LLM(str(model), **SIZES), LLM(str(model), speculative_model=str(folder), **SIZES)
    expected = [each.outputs[0].token_ids for each in plain.generate(prompts(), PARAMS)]
    for _ in range(2):
        outputs = drafting.generate(prompts(), PARAMS)
        assert [each.outputs[0].token_ids for each in outputs] == expected
    assert sum(each.num_cached_tokens for each in outputs) > 0
