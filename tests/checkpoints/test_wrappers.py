"""Text models inside multimodal checkpoints."""

import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints.conversion import convert
from checkpoints.drafts.draft_layer import begun_draft_layer, with_draft_layer, write_with_draft_layer
from checkpoints.random import write_random
from mamba_jax import families
from mamba_jax.config import ModelConfigError
from tests.checkpoints.checks import assert_equal, load, values
from tests.checkpoints.test_load import GOLDENS
from tests.support.models.tiny_configs import CHECKPOINT

WRAPPERS = [
    # outer model_type, key of the text model's config, its tensors' prefix, what the prefix replaces, other towers
    ("NemotronH_Nano_VL_V2", "llm_config", "language_model.", "", ("vision_model.x", "mlp1.0.weight")),
    ("NemotronH_Omni_V3", "llm_config", "language_model.", "", ("sound_encoder.x", "sound_projection.y")),
    ("nemotron_h_omni", "text_config", "model.language_model.", "backbone.", ("model.vision_tower.x",)),
    ("minicpmv", "text_config", "llm.", "", ("vpm.x", "resampler.query")),
]


def wrap(source, target, outer, key, prefix, replaced, towers):
    """Writes a checkpoint again as the text model of a multimodal one."""
    target.mkdir()
    fields = json.loads((source / "config.json").read_text())
    dtype = fields.pop("dtype", "float32")
    wrapped = {"model_type": outer, "dtype": dtype, key: fields, "vision_config": {"hidden_size": 8}}
    (target / "config.json").write_text(json.dumps(wrapped))
    tensors = {
        prefix + name.removeprefix(replaced) if name.startswith(replaced) else name: value
        for name, value in load_file(source / "model.safetensors").items()
    }
    save_file(tensors | dict.fromkeys(towers, np.ones(3, np.float32)), target / "model.safetensors")
    return target


@pytest.mark.parametrize(("outer", "key", "prefix", "replaced", "towers"), WRAPPERS, ids=[one[0] for one in WRAPPERS])
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, caplog, outer, key, prefix, replaced, towers):
    plain = write_random(tmp_path / "plain", CHECKPOINT)
    wrapped = wrap(plain, tmp_path / "wrapped", outer, key, prefix, replaced, towers)
    with caplog.at_level(logging.INFO, logger="checkpoints.load"):
        found = values(load(wrapped))
    assert_equal(found, values(load(plain)))
    (line,) = [record.getMessage() for record in caplog.records if "only the text model" in record.getMessage()]
    for tower in towers:
        assert f"{tower.removeprefix('model.').split('.')[0]} (1)" in line


def test_a_text_model_in_a_multimodal_one_is_converted_to_orbax_only(tmp_path):
    plain = write_random(tmp_path / "plain", CHECKPOINT)
    wrapped = wrap(plain, tmp_path / "wrapped", *WRAPPERS[0])
    with pytest.raises(checkpoints.CheckpointError, match="use --form orbax"):
        convert(wrapped, tmp_path / "hugging-face", form="hugging-face", progress=False)
    assert_equal(values(load(convert(wrapped, tmp_path / "orbax", progress=False))), values(load(plain)))


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=[one[0] for one in WRAPPERS])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_draft_layer_of_a_text_model_in_a_multimodal_one(tmp_path, wrapper, existing):
    """It is added, or it replaces the one that is there under the text model's prefix."""
    drafting = ("num_nextn_predict_layers", "mtp_layers_block_type")
    fields = CHECKPOINT if existing else {name: v for name, v in CHECKPOINT.items() if name not in drafting}
    wrapped = wrap(write_random(tmp_path / "plain", fields), tmp_path / "wrapped", *wrapper)
    raw, config = with_draft_layer(wrapped, "*E" if existing else "*-")
    before = values(load(wrapped))
    expected = before | begun_draft_layer(config, before, 0)
    found = values(load(write_with_draft_layer(wrapped, tmp_path / "with_drafts", raw, config, expected)))
    assert found.keys() == expected.keys()
    assert not existing or any((found[path] != before[path]).any() for path in before if path.startswith("mtp."))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], np.asarray(value, found[path].dtype), rtol=1e-2, err_msg=path)


def test_lfm2_with_a_vision_tower(tmp_path):
    golden = next(path for path in GOLDENS if path.name == "lfm2")
    towers = ("model.vision_tower.x", "model.multi_modal_projector.y")
    wrapped = wrap(golden, tmp_path / "x", "lfm2_vl", "text_config", "model.language_model.", "model.", towers)
    assert_equal(values(load(wrapped)), values(load(golden)))


def test_a_tensor_of_no_tower_is_still_an_error(tmp_path):
    plain = write_random(tmp_path / "plain", CHECKPOINT)
    wrapped = wrap(plain, tmp_path / "wrapped", "some_vl", "llm_config", "language_model.", "", ("adapter.x",))
    with pytest.raises(checkpoints.CheckpointError, match=r"1 unexpected: adapter\.x \[3\]"):
        load(wrapped)


def test_fields_of_the_text_model_win_over_outer_ones():
    raw = {"model_type": "outer", "eos_token_id": 1, "llm_config": {"model_type": "inner", "eos_token_id": 2}, "x": 3}
    assert families.text_fields(raw) == {
        "model_type": "inner", "eos_token_id": 2, "x": 3, "wrapper_model_type": "outer"
    }  # fmt: skip
    assert families.text_fields({"model_type": "plain", "text_config": None})["model_type"] == "plain"


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_a_text_config_that_is_no_object(key):
    with pytest.raises(ModelConfigError, match=f"config field {key} is 3: an object is expected"):
        families.config_from_hf({"model_type": "qwen3_5", key: 3})


def test_a_wrapper_of_an_unknown_text_model_names_the_text_model():
    with pytest.raises(families.UnknownModelType, match="model_type 'llama' is not supported"):
        families.config_from_hf({"model_type": "llava", "text_config": {"model_type": "llama"}})
