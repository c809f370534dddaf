"""A drafter whose heads are divided over devices drafts as on one device."""

from functools import partial

import numpy as np
import pytest
from test_drafter import PARAMS, SIZES, prompts

from checkpoints.load import load_config
from serving import LLM
from tests.support.models.divisible_checkpoints import FAMILIES, write_checkpoint
from tests.support.models.drafters import write_block, write_eagle
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
    flags = SIZES | {"tensor_parallel_size": 2}
    folder = str(write(tmp_path / "drafter", load_config(model)))
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
