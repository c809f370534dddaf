"""The recipe in a run's folder: the same settings and inputs go on, others are refused."""

import dataclasses
import json

import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import DataSettings, OptimizerSettings, TrainConfig
from mamba_jax.train.recipe import RECIPE, keep_recipe

SETTINGS = TrainConfig(model={"hidden_size": 8}, data=DataSettings(mixture={"a": 1.0}))


def test_the_same_recipe_goes_on(tmp_path):
    run = tmp_path / "new/run"
    keep_recipe(run, SETTINGS, corpus_digest="one")
    keep_recipe(run, SETTINGS, corpus_digest="one")
    keep_recipe(run, dataclasses.replace(SETTINGS, log_every=3, save_every=7), corpus_digest=None)
    memory = {"accumulate": 2, "rematerialise": True, "shard_weights": True}
    keep_recipe(run, dataclasses.replace(SETTINGS, save_every=7, **memory), corpus_digest=None)
    kept = json.loads((run / RECIPE).read_text())
    assert kept["corpus_digest"] == "one"
    assert kept["settings"]["save_every"] == 7


def test_a_setting_that_is_newer_than_the_recipe_has_its_default(tmp_path):
    keep_recipe(tmp_path, SETTINGS)
    kept = json.loads((tmp_path / RECIPE).read_text())
    del kept["settings"]["balance_experts"], kept["settings"]["data"]["separate_documents"]
    (tmp_path / RECIPE).write_text(json.dumps(kept))
    with pytest.raises(ModelConfigError, match=r"another recipe: balance_experts was 0\.0, is 0\.5; use"):
        keep_recipe(tmp_path, dataclasses.replace(SETTINGS, balance_experts=0.5))
    keep_recipe(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("changes", "inputs", "message"),
    [
        ({}, {"corpus_digest": "two"}, "corpus digest was one, is two"),
        ({"seed": 3}, {}, "seed was 0, is 3"),
        ({"balance_experts": 0.5}, {}, "balance_experts was 0.0, is 0.5"),
        ({"model": {"hidden_size": 16}}, {}, "model.hidden_size was 8, is 16"),
        ({"model": {}}, {}, "model.hidden_size was 8, is None"),
        ({"steps": 3}, {}, "steps was 1000, is 3"),
        ({"optimizer": OptimizerSettings(learning_rate=1.0)}, {}, "optimizer.learning_rate was 0.001, is 1.0"),
    ],
)
def test_another_recipe_is_refused(tmp_path, changes, inputs, message):
    keep_recipe(tmp_path, SETTINGS, corpus_digest="one")
    before = (tmp_path / RECIPE).read_text()
    with pytest.raises(ModelConfigError, match=message) as error:
        keep_recipe(tmp_path, dataclasses.replace(SETTINGS, **changes), **inputs)
    assert "use another --output" in str(error.value)
    assert (tmp_path / RECIPE).read_text() == before


def test_a_stable_schedule_may_end_later(tmp_path):
    stable = dataclasses.replace(SETTINGS, optimizer=OptimizerSettings(schedule="stable", decay_steps=10))
    keep_recipe(tmp_path, stable)
    keep_recipe(tmp_path, dataclasses.replace(stable, steps=2000))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"settings": 3}'])
def test_a_broken_recipe_is_said(tmp_path, text):
    (tmp_path / RECIPE).write_text(text)
    with pytest.raises(ModelConfigError, match="cannot be read"):
        keep_recipe(tmp_path, SETTINGS)
