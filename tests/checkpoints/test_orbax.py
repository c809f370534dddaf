"""Checkpoints of our own: a round trip, any sharding, and what is said when something is wrong."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import checkpoints
from checkpoints.config_json import config_from_json, config_to_json
from checkpoints.orbax import read_description
from checkpoints.presets import preset, preset_names
from checkpoints.random import write_random
from mamba_jax.model import parameters
from tests.checkpoints.checks import assert_equal, load, message, values
from tests.support.models.tiny_configs import CHECKPOINT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("hf"), CHECKPOINT, dtype="bfloat16", tokenizer='{"version": "1.0"}')


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return checkpoints.convert(source, tmp_path_factory.mktemp("orbax") / "tiny", progress=False)


def row_sharding(count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("model",))
    rows = NamedSharding(mesh, PartitionSpec("model"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return lambda path: rows if path.endswith(("up_proj.weight", "out_proj.weight")) else everywhere


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "auto"])
def test_round_trip(source, converted, dtype):
    assert_equal(values(load(converted, dtype=dtype)), values(load(source, dtype=dtype)))
    assert checkpoints.load_config(converted) == checkpoints.load_config(source)


def test_convert_keeps_the_dtype_and_copies_the_small_files(converted):
    assert read_description(converted).dtype == "bfloat16"
    assert {path.name for path in converted.iterdir()} == {"config.json", "mamba_jax.json", "tokenizer.json", "weights"}
    assert checkpoints.generation_config(converted).eos_token_ids == (2, 3)


@pytest.mark.parametrize("saved_on", [None, 2])
@pytest.mark.parametrize("loaded_on", [None, 2, 4])
def test_any_sharding_reads_any_other(source, tmp_path, saved_on, loaded_on):
    saving = saved_on and row_sharding(saved_on)
    loading = loaded_on and row_sharding(loaded_on)
    directory = checkpoints.convert(source, tmp_path / "o", sharding=saving, progress=False)
    model = load(directory, dtype="bfloat16", sharding=loading)
    assert_equal(values(model), values(load(source, dtype="bfloat16")))
    for path, leaf in parameters(model).items():
        placed = leaf.get_value().sharding
        assert placed == loading(path) if loading else len(placed.device_set) == 1


def test_existing_directories_are_kept_unless_told_otherwise(source, tmp_path):
    (tmp_path / "mine.txt").touch()
    text = message(checkpoints.convert, source, tmp_path, progress=False)
    assert text == f"{tmp_path}: exists already and is not empty"
    for _ in range(2):
        checkpoints.convert(source, tmp_path, overwrite=True, progress=False)
    assert (tmp_path / "mine.txt").exists()


def test_target_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").touch()
    text = message(checkpoints.convert, source, tmp_path / "file" / "x", progress=False)
    assert text == f"{tmp_path}/file/x: cannot be written (Not a directory)"


@pytest.fixture
def copy(source, tmp_path):
    return checkpoints.convert(source, tmp_path / "copy", progress=False)


INVALID = "/mamba_jax.json: not a description of a model ("


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.update(version=9), "/mamba_jax.json: version 9, this program reads 1"),
        (lambda fields: fields.pop("config"), f"{INVALID}'config')"),
        (lambda fields: fields["config"].update(color=1), f"{INVALID}HybridConfig: unknown fields color)"),
        (lambda fields: fields["config"].pop("pattern"), f"{INVALID}HybridConfig: missing fields pattern)"),
        (lambda fields: fields["config"].update(mamba=3), f"{INVALID}MambaConfig: expected an object, found 3)"),
        (lambda fields: fields["config"].update(pattern="X"), f"{INVALID}layer pattern 'X' has"),
        (
            lambda fields: fields["config"].update(vocab_size=62),
            ": 2 parameters do not fit: embed.weight: stored [61, 32], needed [62, 32], "
            "lm_head.weight: stored [61, 32], needed [62, 32]",
        ),
    ],
)
def test_descriptions_that_are_wrong_or_do_not_fit(copy, change, said):
    path = copy / "mamba_jax.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    assert message(load, copy).startswith(f"{copy}{said}")


def test_damaged_weights(copy):
    for path in (copy / "weights").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(b"x" * 100)
    text = message(load, copy)
    assert text.startswith(f"{copy}/weights: cannot be restored (")


def test_incomplete_directory(copy):
    (copy / "weights").rename(copy / "elsewhere")
    assert message(load, copy) == f"{copy}: has no weights folder"


@pytest.mark.parametrize("name", preset_names())
def test_every_config_survives_json(name):
    config = preset(name)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
