"""Writing Hugging Face directories and checkpoints of our own, and adding a draft layer to one."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import checkpoints
import mamba_jax
from checkpoints import load_config
from checkpoints.config_json import config_from_json, config_to_json
from checkpoints.drafts import fresh_draft_layer, with_draft_layer, write_with_draft_layer
from checkpoints.json_file import read_json
from checkpoints.orbax import read_description
from checkpoints.presets import PRESETS
from checkpoints.random import write_random
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.model import parameters
from tests.checkpoints.checks import assert_equal, load, message, values
from tests.support.models.golden_case import FIXTURES, NAMES
from tests.support.models.tiny_configs import CHECKPOINT

CONFIGS = {name: read_json(FIXTURES / name / "config.json") for name in NAMES}
BAMBA, GRANITE, MAMBA2 = (CONFIGS[name] for name in ("bamba", "granite-rope", "mamba2"))


@pytest.mark.smoke("pattern")
@pytest.mark.parametrize(
    ("raw", "pattern"),
    [(BAMBA, "*-"), (GRANITE, "*-"), (MAMBA2, "-"), (CHECKPOINT | {"num_nextn_predict_layers": 0}, "*-")],
    ids=["bamba", "granite", "mamba2", "nemotron_h"],
)
def test_a_layer_is_added(tmp_path, raw, pattern):
    source = write_random(tmp_path / "source", raw, seed=1, dtype="bfloat16")
    before = values(load(source))
    fields, config = with_draft_layer(source, pattern)
    layer = fresh_draft_layer(config, 3)
    model = load(write_with_draft_layer(source, tmp_path / "target", fields, config, layer))
    assert model.config == config
    assert model.config.mtp_pattern == pattern
    after = values(model)
    assert_equal({path: value for path, value in after.items() if not path.startswith("mtp.")}, before)
    rounded = {path: np.asarray(v.astype(jnp.bfloat16).astype(jnp.float32)) for path, v in layer.items()}
    assert_equal({path: value for path, value in after.items() if path.startswith("mtp.")}, rounded)
    # Training goes on from a layer of the same kind, and refuses another.
    more = {path: value + 1 for path, value in layer.items()}
    again = values(load(write_with_draft_layer(tmp_path / "target", tmp_path / "again", fields, config, more)))
    assert (again["mtp.enorm.weight"] == 2).all()
    fields, config = with_draft_layer(tmp_path / "target", "--")
    with pytest.raises(checkpoints.CheckpointError, match="layer of another kind"):
        write_with_draft_layer(tmp_path / "target", tmp_path / "x", fields, config, fresh_draft_layer(config, 0))


def test_what_cannot_be_added(tmp_path):
    source = write_random(tmp_path / "source", MAMBA2, seed=1)
    assert "a Mamba2 model has no attention that could be added" in message(with_draft_layer, source, "*-")
    assert "cannot be added" in message(with_draft_layer, source, "E")
    fields, config = with_draft_layer(source, "-")
    layer = fresh_draft_layer(config, 0)
    assert "is not empty" in message(write_with_draft_layer, source, source, fields, config, layer)


@pytest.mark.smoke("kind")
@pytest.mark.parametrize(("golden", "kind"), [(FIXTURES / n, c["model_type"]) for n, c in CONFIGS.items()], ids=CONFIGS)
def test_a_saved_model_has_the_tensors_that_transformers_wrote(golden, kind, tmp_path):
    """Names may be another of the spellings that the family reads; all values come back, and transformers' names are
    kept where a checkpoint has one spelling only."""
    model = mamba_jax.load(str(golden), dtype="float32")
    mamba_jax.save(model, str(tmp_path / "saved"))
    assert_equal(values(load(tmp_path / "saved")), values(model))
    theirs, ours = TensorSet(golden), TensorSet(tmp_path / "saved")
    for name in ours.names & theirs.names:
        np.testing.assert_array_equal(ours.view(name), np.asarray(theirs.view(name), np.float32), err_msg=name)
    saved, before = (read_json(directory / "config.json") for directory in (tmp_path / "saved", golden))
    assert {**saved, "dtype": None, "torch_dtype": None} == {**before, "dtype": None, "torch_dtype": None}
    assert saved["dtype"] == "float32"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["bamba", "olmo-hybrid"])
def test_conversion_to_hugging_face_keeps_names_and_values(name, tmp_path):
    golden = FIXTURES / name
    checkpoints.convert(golden, tmp_path / "copy", form="hugging-face")
    theirs, ours = TensorSet(golden), TensorSet(tmp_path / "copy")
    assert ours.names == theirs.names
    for name in ours.names:
        assert ours.dtype(name) == theirs.dtype(name)
        np.testing.assert_array_equal(ours.view(name), theirs.view(name), err_msg=name)
    assert read_json(tmp_path / "copy/config.json") == read_json(golden / "config.json")
    checkpoints.convert(golden, tmp_path / "wide", form="hugging-face", dtype="float32")
    assert_equal(values(load(tmp_path / "wide")), values(load(golden)))
    checkpoints.convert(golden, tmp_path / "orbax", progress=False)
    checkpoints.convert(tmp_path / "orbax", tmp_path / "back", form="hugging-face")
    assert_equal(values(load(tmp_path / "back")), values(load(golden)))


def test_what_cannot_be_saved_is_said(tmp_path):
    one = write_random(tmp_path / "one", BAMBA, seed=1)
    model = mamba_jax.load(str(one), dtype="float32")
    assert "exists already" in message(mamba_jax.save, model, str(one))
    other = write_random(tmp_path / "other", GRANITE, seed=1)
    assert "describes another model" in message(mamba_jax.save, model, str(tmp_path / "new"), like=str(other))
    assert "give like=" in message(mamba_jax.save, load(one), str(tmp_path / "new"))
    narrow = mamba_jax.load(str(one), dtype="float32", quantization="int8")
    assert "weights are quantized" in message(mamba_jax.save, narrow, str(tmp_path / "new"))


def test_a_saved_model_has_neither_figures_nor_data_of_the_original(tmp_path):
    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    checkpoints.convert("demo", tmp_path / "saved", form="hugging-face", dtype="float32")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == copied | {"config.json", "model.safetensors"}


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


@pytest.mark.smoke
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 4), (None, 2), (2, None)])
def test_any_sharding_reads_any_other(source, tmp_path, saved_on, loaded_on):
    saving, loading = (count and row_sharding(count) for count in (saved_on, loaded_on))
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
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


INVALID = "/mamba_jax.json: not a description of a model ("


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fields: fields.update(version=9), "/mamba_jax.json: version 9, this program reads 1"),
        (lambda fields: fields.pop("config"), f"{INVALID}'config')"),
        (lambda fields: fields["config"].update(color=1), f"{INVALID}HybridConfig.color: Unexpected keyword argument)"),
        (lambda fields: fields["config"].pop("pattern"), f"{INVALID}HybridConfig.pattern: Field required)"),
        (lambda fields: fields["config"].update(mamba=3), f"{INVALID}HybridConfig.mamba: Input should be a dict"),
        (lambda fields: fields["config"].update(pattern="X"), f"{INVALID}HybridConfig: Value error, layer pattern 'X'"),
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


def test_damaged_and_incomplete_weights(copy):
    for path in (copy / "weights").rglob("*"):
        if path.is_file() and path.stat().st_size > 5000:
            path.write_bytes(b"x" * 100)
    assert message(load, copy).startswith(f"{copy}/weights: cannot be restored (")
    (copy / "weights").rename(copy / "elsewhere")
    assert message(load, copy) == f"{copy}: has no weights folder"


@pytest.mark.parametrize("name", PRESETS)
def test_every_config_survives_json(name):
    config = load_config(name)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
