"""Run descriptions: what is read, and what is said about a wrong one. The recipe in a run's folder: the same settings
and inputs go on, others are refused.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

import mamba_jax.train
from benchmarks.demo_corpus import SOURCES
from mamba_jax.config import ModelConfigError
from mamba_jax.families import config_from_hf
from mamba_jax.train.config import FINE_TUNING, DataSettings, OptimizerSettings, TrainConfig, read_config
from mamba_jax.train.optimizer import learning_rate
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


RECIPES = sorted((Path(mamba_jax.train.__file__).parent / "recipes").glob("*.yaml"))


def read(tmp_path, text, name="run.yaml", **overrides):
    path = tmp_path / name
    path.write_text(text)
    return read_config(path, overrides)


def test_yaml_and_toml_say_the_same(tmp_path):
    yaml = read(tmp_path, "steps: 7\noptimizer: {name: muon, betas: [0.8, 0.9], learning_rate: 1}\n")
    toml = read(tmp_path, 'steps = 7\n[optimizer]\nname = "muon"\nbetas = [0.8, 0.9]\nlearning_rate = 1\n', "run.toml")
    assert yaml == toml == TrainConfig(steps=7, optimizer=OptimizerSettings("muon", 1.0, betas=(0.8, 0.9)))


@pytest.mark.parametrize("value", ["1e-3", "1E-3", ".001", 0.001])
def test_a_number_without_a_point_is_a_number(tmp_path, value):
    """YAML reads `1e-3` as text."""
    assert read(tmp_path, "", **{"optimizer.learning_rate": value}).optimizer.learning_rate == 1e-3
    assert read(tmp_path, "optimizer: {learning_rate: 1e-3}").optimizer.learning_rate == 1e-3


@pytest.mark.parametrize("value", ["nan", "inf", "fast"])
def test_what_is_no_finite_number_is_refused(tmp_path, value):
    with pytest.raises(ModelConfigError, match=f"learning_rate is '?{value}'?: input should be a"):
        read(tmp_path, "", **{"optimizer.learning_rate": value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps: 7", "unknown setting stepps; known are model, data"),
        ("optimizer: {rate: 1}", "unknown setting optimizer.rate"),
        ("steps: many", "steps is 'many': input should be a valid integer"),
        ("steps: 0", "steps is 0: input should be greater than or equal to 1"),
        ("balance_experts: -1", "balance_experts is -1: input should be greater than or equal to 0"),
        ("batch_size: 8\naccumulate: 3", "accumulate is 3: it must divide batch_size, 8"),
        ("drafts: {every: 0}", "drafts.every is 0: input should be greater"),
        (
            "drafts: {depth_weights: [-1.0]}",
            "drafts.depth_weights.0 is -1.0: input should be greater than or equal to 0",
        ),
        ("optimizer: {warmup_steps: -1}", "optimizer.warmup_steps is -1: input should be greater"),
        ("optimizer: {weight_decay: -0.1}", "optimizer.weight_decay is -0.1: input should be greater"),
        ("optimizer: {learning_rate: 0}", "optimizer.learning_rate is 0: input should be greater than 0"),
        ("optimizer: {clip_norm: -1}", "optimizer.clip_norm is -1: input should be greater than 0"),
        ("optimizer: {betas: [0.9, 1]}", "optimizer.betas.1 is 1: input should be less than 1"),
        ("optimizer: {name: sgd}", "optimizer.name is 'sgd': input should be 'adamw' or 'muon'"),
        ("optimizer: 3", "optimizer is 3: input should be an object"),
        ("batch_size: 6\ndrafts: {every: 4}", "it must divide batch_size / accumulate, 6"),
        ("data: {mixture: {a: 0}}", "data.mixture.a is 0: input should be greater than 0"),
        ("seed: -1", "seed is -1: input should be greater than or equal to 0"),
        ("steps: [", "cannot be read"),
        ("steps: 2020-13-45", "cannot be read"),
        ("steps: " + "1" * 5000, "cannot be read"),
        ("[" * 1200, "cannot be read"),
        ("model: &a [*a]", "cannot be read"),
        ("model: {2020-01-01: 1}", "cannot be read"),
        ("- 1", "a mapping of settings is expected"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, message):
    with pytest.raises(ModelConfigError, match=message) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes(path):
    settings = read_config(path)
    if path == FINE_TUNING:
        assert not settings.model
    else:
        assert config_from_hf(settings.model).mtp_pattern
        assert settings.data.mixture.keys() == SOURCES.keys()
    rate = learning_rate(settings.optimizer, settings.steps)
    assert float(rate(settings.steps)) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("schedule", ["cosine", "stable"])
def test_the_learning_rate_rises_and_falls(schedule):
    settings = OptimizerSettings(learning_rate=2.0, warmup_steps=10, schedule=schedule, decay_steps=20)
    rate = learning_rate(settings, 100)
    assert float(rate(0)) == 0
    assert float(rate(5)) == pytest.approx(1)
    assert float(rate(10)) == pytest.approx(2)
    assert float(rate(90)) == pytest.approx(1 if schedule == "stable" else 0.06, abs=0.01)
    assert float(rate(100)) == pytest.approx(0)
    with pytest.raises(ModelConfigError, match="there are only 25"):
        learning_rate(settings, 25)
