"""Writing Hugging Face directories, and adding a draft layer to one."""

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
import mamba_jax
from checkpoints.drafts.draft_layer import fresh_draft_layer, with_draft_layer, write_with_draft_layer
from checkpoints.export import stored_tensors, write_hugging_face
from checkpoints.json_file import read_json
from checkpoints.random import RandomTensors, write_random
from checkpoints.tensors.tensor_set import TensorSet
from tests.checkpoints.checks import assert_equal, load, values
from tests.support.models.golden_case import FIXTURES, NAMES
from tests.support.models.tiny_configs import CHECKPOINT

BAMBA, GRANITE, MAMBA2, OLMO = (
    read_json(FIXTURES / name / "config.json") for name in ("bamba", "granite-rope", "mamba2", "olmo-hybrid")
)
FAMILIES = {"nemotron_h": CHECKPOINT, "bamba": BAMBA, "granite": GRANITE, "mamba2": MAMBA2, "olmo_hybrid": OLMO}


@pytest.mark.parametrize("raw", FAMILIES.values(), ids=FAMILIES)
def test_what_is_written_is_what_was_read(tmp_path, raw):
    model = load(write_random(tmp_path / "a", raw, seed=1))
    tensors, stored = dict(stored_tensors(model.config, values(model))), RandomTensors(raw, seed=1)
    assert tensors.keys() == stored.names
    assert_equal(tensors, {name: stored.view(name) for name in tensors})
    again = write_hugging_face(tmp_path / "b", model.config, values(model), raw, dtype="float32")
    assert_equal(values(load(again)), values(model))


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
    with pytest.raises(checkpoints.CheckpointError, match="a Mamba2 model has no attention that could be added"):
        with_draft_layer(source, "*-")
    with pytest.raises(checkpoints.CheckpointError, match="cannot be added"):
        with_draft_layer(source, "E")
    fields, config = with_draft_layer(source, "-")
    with pytest.raises(checkpoints.CheckpointError, match="is not empty"):
        write_with_draft_layer(source, source, fields, config, fresh_draft_layer(config, 0))


@pytest.mark.parametrize("golden", map(FIXTURES.joinpath, NAMES), ids=NAMES)
def test_a_saved_model_has_the_tensors_that_transformers_wrote(golden, tmp_path):
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
    with pytest.raises(checkpoints.CheckpointError, match="exists already"):
        mamba_jax.save(model, str(one))
    other = write_random(tmp_path / "other", GRANITE, seed=1)
    with pytest.raises(checkpoints.CheckpointError, match="describes another model"):
        mamba_jax.save(model, str(tmp_path / "new"), like=str(other))
    with pytest.raises(checkpoints.CheckpointError, match="give like="):
        mamba_jax.save(load(one), str(tmp_path / "new"))
    narrow = mamba_jax.load(str(one), dtype="float32", quantization="int8")
    with pytest.raises(checkpoints.CheckpointError, match="weights are quantized"):
        mamba_jax.save(narrow, str(tmp_path / "new"))


def test_a_saved_model_has_neither_figures_nor_data_of_the_original(tmp_path):
    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    checkpoints.convert("demo", tmp_path / "saved", form="hugging-face", dtype="float32")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == copied | {"config.json", "model.safetensors"}
