"""The recipe in a run's folder: the same settings and inputs go on, others are refused."""

import dataclasses
import json

import pytest
import yaml

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import DataSettings, OptimizerSettings, TrainConfig
from mamba_jax.train.recipe import CHECKPOINTS, RECIPE, keep_recipe
from serving.cli.main import run as run_command
from tests.support.models.tiny_configs import TRAINABLE

SETTINGS = TrainConfig(model={"hidden_size": 8}, data=DataSettings(mixture={"a": 1.0}))


@pytest.fixture
def run(tmp_path):
    """The folder of a run after some steps."""
    (tmp_path / CHECKPOINTS / "7").mkdir(parents=True)
    return tmp_path


def test_the_same_recipe_goes_on(tmp_path):
    run = tmp_path / "new/run"
    keep_recipe(run, SETTINGS, corpus_digest="one")
    keep_recipe(run, SETTINGS, corpus_digest="one")
    keep_recipe(run, dataclasses.replace(SETTINGS, log_every=3, save_every=7), corpus_digest=None)
    memory = {"accumulate": 2, "rematerialize": True, "shard_weights": True}
    keep_recipe(run, dataclasses.replace(SETTINGS, save_every=7, **memory), corpus_digest=None)
    kept = json.loads((run / RECIPE).read_text())
    assert kept["corpus_digest"] == "one"
    assert kept["settings"]["save_every"] == 7


def test_a_setting_that_is_newer_than_the_recipe_has_its_default(run):
    keep_recipe(run, SETTINGS)
    kept = json.loads((run / RECIPE).read_text())
    del kept["settings"]["balance_experts"], kept["settings"]["data"]["separate_documents"]
    (run / RECIPE).write_text(json.dumps(kept))
    with pytest.raises(ModelConfigError, match=r"another recipe: balance_experts was 0\.0, is 0\.5; use"):
        keep_recipe(run, dataclasses.replace(SETTINGS, balance_experts=0.5))
    keep_recipe(run, SETTINGS)


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
def test_another_recipe_is_refused(run, changes, inputs, message):
    keep_recipe(run, SETTINGS, corpus_digest="one")
    before = (run / RECIPE).read_text()
    with pytest.raises(ModelConfigError, match=message) as error:
        keep_recipe(run, dataclasses.replace(SETTINGS, **changes), **inputs)
    assert "use another --output" in str(error.value)
    assert (run / RECIPE).read_text() == before


@pytest.mark.parametrize(
    ("changes", "inputs", "prepared"),
    [
        ({"steps": 3, "optimizer": OptimizerSettings(warmup_steps=1)}, {}, True),
        ({"model": {"hidden_size": 16}}, {}, False),
        ({}, {"corpus_digest": "two"}, False),
    ],
)
def test_a_folder_without_a_step_is_no_run(tmp_path, changes, inputs, prepared):
    """Another recipe takes its place; data stays if it is what the new recipe would prepare."""
    keep_recipe(tmp_path, SETTINGS, corpus_digest="one")
    (tmp_path / "tokens.npz").touch()
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / CHECKPOINTS / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    changed = dataclasses.replace(SETTINGS, **changes)
    keep_recipe(tmp_path, changed, **inputs)
    assert (tmp_path / "tokens.npz").exists() == (tmp_path / "tokenizer").exists() == prepared
    kept = json.loads((tmp_path / RECIPE).read_text())
    assert kept["settings"] == json.loads(json.dumps(dataclasses.asdict(changed)))


def test_a_stable_schedule_may_end_later(run):
    stable = dataclasses.replace(SETTINGS, optimizer=OptimizerSettings(schedule="stable", decay_steps=10))
    keep_recipe(run, stable)
    keep_recipe(run, dataclasses.replace(stable, steps=2000))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"settings": 3}'])
def test_a_broken_recipe_is_said(tmp_path, text):
    (tmp_path / RECIPE).write_text(text)
    with pytest.raises(ModelConfigError, match="cannot be read"):
        keep_recipe(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 30}, "optimizer.warmup_steps is 100"),
        ({"data": {"mixture": {"other": 1.0}}}, "data.mixture has 'other'; the corpus has text"),
        ({"data": {"aligned": ["other"]}}, "data.aligned has 'other'; the corpus has text"),
        ({"data": {"validation": "nowhere"}}, "nowhere: no validation data"),
    ],
)
def test_settings_are_checked_before_anything_is_prepared(tmp_path, monkeypatch, capfd, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"id": "1", "text": "a b c"}\n')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": TRAINABLE, "batch_size": 8} | settings))
    assert run_command(["train", "--config", "run.yaml", "--output", "run", "--corpus", "text.jsonl"]) != 0
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
