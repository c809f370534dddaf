"""The multi-token-prediction layer within steps. Steps draft by it as by EAGLE-3's drafter: see `test_drafters`."""

import dataclasses

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.drafts import MTPDrafts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.step import step as run_step
from tests.support.engines.draft_traces import assert_updated_in_place
from tests.support.fleets.step_host import PAGES_PER_ROW, Host
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import STEP

WITH_MTP = dataclasses.replace(STEP, mtp_pattern="*-")
WITH_TABLES = dataclasses.replace(WITH_MTP, own_mtp_embedding=True, own_mtp_head=True)
PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]


def test_the_layer_may_have_tables_of_its_own():
    """With the model's values, they change nothing; with others, the logits. Parity tests cover the layer itself."""
    values = {path: leaf[...] for path, leaf in parameters(long_memory_model(WITH_MTP)).items()}
    tables = {"mtp.embed.weight": values["embed.weight"], "mtp.lm_head.weight": values["lm_head.weight"]}
    hidden = np.random.default_rng(3).normal(size=(13, STEP.hidden_size)).astype(np.float32)

    @jax.jit
    def run(model):
        return model.draft_logits(model.draft(np.array(PROMPT), hidden, SequenceLayout.of(1, 13), None)[0])

    expected = run(long_memory_model(WITH_MTP))
    np.testing.assert_array_equal(run(HybridModel.from_parameters(WITH_TABLES, values | tables)), expected)
    for path, table in tables.items():
        other = HybridModel.from_parameters(WITH_TABLES, values | tables | {path: table[::-1]})
        assert np.abs(run(other) - expected)[1:].max() > 0.1


@pytest.mark.parametrize("drafts", [3, 0], ids=["wide", "narrow"])
def test_the_draft_layer_updates_the_store_in_place(drafts):
    assert_updated_in_place(Host(WITH_MTP, source=MTPDrafts()), drafts)


def test_without_drafts_a_step_is_what_it_would_be_without_a_draft_layer():
    """K = 0: the same program, whether or not a model has the layer."""
    texts = []
    for config in (STEP, WITH_MTP):
        host = Host(STEP, num_drafts=0)
        model = long_memory_model(config)
        step = jax.jit(lambda store, rows, batch, model=model: run_step(model, store, rows, batch))
        batch = DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=PAGES_PER_ROW)
        texts.append(step.lower(host.store, host.rows, batch).as_text())
    assert texts[0] == texts[1]
