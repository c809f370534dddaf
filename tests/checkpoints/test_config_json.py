"""Fields of config.json and generation_config.json: `hf_overrides`, and text models inside multimodal checkpoints."""

import json
import logging
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.config_json import GenerationConfig, read_generation_config
from checkpoints.conversion import convert
from checkpoints.drafts import begun_draft_layer, with_draft_layer, write_with_draft_layer
from checkpoints.json_file import merged, parse_overrides, read_json
from checkpoints.load import Checkpoint, load_config
from checkpoints.random import write_random
from mamba_jax.config import need
from tests.checkpoints.checks import assert_equal, load, message, values
from tests.support.models.golden_case import FIXTURES
from tests.support.models.tiny_configs import CHECKPOINT

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
QWEN = {"model_type": "qwen3_5_text", "max_position_embeddings": 262144, "num_hidden_layers": 4}
QWEN |= {"rope_parameters": ROPE}
WRAPPED = {"model_type": "qwen3_5", "text_config": QWEN, "llm_config": None, "tie_word_embeddings": True}


def config_of(tmp_path, raw, overrides):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_config(tmp_path, hf_overrides=overrides)


@pytest.mark.parametrize("raw", [QWEN, WRAPPED])
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", **{name: YARN[name] for name in list(YARN)[1:]}}},
        {"text_config": {"rope_parameters": YARN}},
        {f"text_config.rope_parameters.{name}": value for name, value in YARN.items()},
        json.dumps({"rope_parameters": YARN}),
    ],
)
def test_yarn_extends_the_context_and_keeps_the_other_fields(tmp_path, raw, overrides):
    config = config_of(tmp_path, raw, overrides)
    assert config.max_position_embeddings == 1 << 20
    rope = need(need(config.attention).rope)
    assert rope.frequencies
    assert (rope.theta, rope.size) == (1e7, 64)


@pytest.mark.parametrize("raw", [QWEN, WRAPPED])
def test_a_plain_field_is_replaced(tmp_path, raw):
    assert config_of(tmp_path, raw, {"max_position_embeddings": 1000000}).max_position_embeddings == 1000000
    assert need(need(config_of(tmp_path, raw, {"rope_theta": 5e6}).attention).rope).theta == 5e6


def test_the_spelling_of_config_json_is_used():
    found = merged({"rope_scaling": {"type": "linear", "a": 1}}, {"rope_parameters": {"rope_type": "yarn"}})
    assert found == {"rope_scaling": {"type": "yarn", "a": 1}}
    assert merged({"rope_scaling": None}, {"rope_parameters": {"b": 1}})["rope_parameters"] == {"b": 1}
    assert merged({"torch_dtype": "float32"}, {"dtype": "bfloat16"}) == {"torch_dtype": "bfloat16"}
    assert merged({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_dotted_keys_are_nested_fields():
    assert parse_overrides({"c": 1, "a.b.c": 2, "a": {"b.d": 3}}) == {"a": {"b": {"c": 2, "d": 3}}, "c": 1}
    one, other = parse_overrides({"b": 1, "a": {"d": 1, "c": 2}}), parse_overrides('{"a.c": 2, "a.d": 1, "b": 1}')
    assert json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("{", "hf_overrides: not JSON"),
        ("[1]", "hf_overrides: a JSON object is expected, not [1]"),
        ("[" * 100_000, "hf_overrides: nested too deeply"),
        ({"a." * 100_000: 1}, "hf_overrides: nested too deeply"),
        ({"text_config": 3}, "text_config is 3: an object is expected"),
        ({"llm_config": 3}, "llm_config is 3: an object is expected"),
        ({"hidden_size": "big"}, "hidden_size is 'big': a whole number is expected"),
        ({"model_type": "x"}, "model_type 'x' is not supported"),
    ],
)
@pytest.mark.parametrize("model", ["demo", "nemotron-h-8b"])
def test_wrong_overrides_are_refused(model, overrides, said):
    assert said in message(load_config, model, hf_overrides=overrides)


def test_a_published_size_takes_overrides():
    assert load_config("nemotron-h-8b", hf_overrides={"layer_norm_epsilon": 0.5}).norm_eps == 0.5
    assert load_config("nemotron-h-8b").norm_eps != 0.5


def test_an_orbax_directory_refuses_overrides(tmp_path):
    (tmp_path / "mamba_jax.json").write_text("{}")
    assert "an Orbax directory does not use" in message(load_config, tmp_path, hf_overrides={"a": 1})


def test_overrides_are_part_of_the_digest_of_weights(tmp_path):
    directory = write_random(tmp_path / "tiny", CHECKPOINT)
    overrides = [None, {"layer_norm_epsilon": 0.5}, {"norm_eps": 0.5}, {"not_a_field": 1}, {"not_a_field": 2}]
    digests = [Checkpoint(directory, hf_overrides=each).load_identified(progress=False).digest for each in overrides]
    assert len(set(digests)) == len(overrides)
    assert Checkpoint(directory, hf_overrides={}).load_identified(progress=False).digest == digests[0]
    assert Checkpoint(directory, hf_overrides='{"not_a_field": 2}').load_identified(progress=False).digest == digests[4]


def test_a_directory_in_place_of_a_file_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        assert "Is a directory" in message(read_json, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def write(directory, name, content):
    (directory / name).write_text(json.dumps(content))


def test_all_fields(tmp_path):
    fields = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    more = {"eos_token_id": [2, 11, 2], "max_new_tokens": 7, "do_sample": True}
    write(tmp_path, "generation_config.json", {**fields, **more})
    assert read_generation_config(tmp_path) == GenerationConfig(eos_token_ids=(2, 11), max_new_tokens=7, **fields)
    write(tmp_path, "generation_config.json", {"do_sample": False, "temperature": 1.0})
    assert read_generation_config(tmp_path).temperature == 0.0, "greedy"


def test_ids_that_end_a_text_fall_back_to_the_model_config(tmp_path):
    assert read_generation_config(tmp_path) == GenerationConfig()
    write(tmp_path, "config.json", {"eos_token_id": 5})
    assert read_generation_config(tmp_path).eos_token_ids == (5,)
    write(tmp_path, "config.json", {"model_type": "x_vl", "text_config": {"eos_token_id": [5]}})
    write(tmp_path, "generation_config.json", {"temperature": 1})
    assert read_generation_config(tmp_path).eos_token_ids == (5,)
    write(tmp_path, "config.json", {"eos_token_id": [5, 6, 7]})
    write(tmp_path, "generation_config.json", {"eos_token_id": 6})
    assert read_generation_config(tmp_path).eos_token_ids == (6,)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "hot"}, "config field temperature is 'hot': a number is expected"),
        ({"top_k": 1.5}, "config field top_k is 1.5: a whole number is expected"),
        ({"eos_token_id": "x"}, "config field eos_token_id is 'x': a whole number or a list of them is expected"),
        ({"eos_token_id": [True]}, "config field eos_token_id is [True]: a whole number or a list of them is expected"),
    ],
)
def test_wrong_kinds(tmp_path, fields, said):
    write(tmp_path, "generation_config.json", fields)
    assert message(read_generation_config, tmp_path) == f"{tmp_path}/generation_config.json: {said}"


WRAPPERS = [
    # outer model_type, key of the text model's config, its tensors' prefix, what the prefix replaces, other towers
    ("NemotronH_Nano_VL_V2", "llm_config", "language_model.", "", ("vision_model.x", "mlp1.0.weight")),
    ("NemotronH_Omni_V3", "llm_config", "language_model.", "", ("sound_encoder.x", "sound_projection.y")),
    ("nemotron_h_omni", "text_config", "model.language_model.", "backbone.", ("model.vision_tower.x",)),
    ("minicpmv", "text_config", "llm.", "", ("vpm.x", "resampler.query")),
]
TOWERS = ("model.vision_tower.x", "model.multi_modal_projector.y")
LFM2 = ("lfm2_vl", "text_config", "model.language_model.", "model.", TOWERS)


def wrap(tmp_path, outer, key, prefix, replaced, towers, *, fields=CHECKPOINT):
    """Writes a checkpoint, and again as the text model of a multimodal one. That of LFM2 is the golden one."""
    source = FIXTURES / "lfm2" if outer == LFM2[0] else write_random(tmp_path / "plain", fields)
    target = tmp_path / "wrapped"
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
    return source, target


@pytest.mark.parametrize("wrapper", [*WRAPPERS, LFM2], ids=lambda wrapper: wrapper[0])
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, caplog, wrapper):
    plain, wrapped = wrap(tmp_path, *wrapper)
    with caplog.at_level(logging.INFO, logger="checkpoints.load"):
        found = values(load(wrapped))
    assert_equal(found, values(load(plain)))
    (line,) = [record.getMessage() for record in caplog.records if "only the text model" in record.getMessage()]
    for tower in wrapper[-1]:
        assert f"{tower.removeprefix('model.').split('.')[0]} (1)" in line


def test_a_text_model_in_a_multimodal_one_is_converted_to_orbax_only(tmp_path):
    plain, wrapped = wrap(tmp_path, *WRAPPERS[0])
    assert "use --form orbax" in message(convert, wrapped, tmp_path / "hf", form="hugging-face", progress=False)
    assert_equal(values(load(convert(wrapped, tmp_path / "orbax", progress=False))), values(load(plain)))


@pytest.mark.smoke("existing")
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper[0])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_draft_layer_of_a_text_model_in_a_multimodal_one(tmp_path, wrapper, existing):
    """It is added, or it replaces the one that is there under the text model's prefix."""
    drafting = ("num_nextn_predict_layers", "mtp_layers_block_type")
    fields = CHECKPOINT if existing else {name: v for name, v in CHECKPOINT.items() if name not in drafting}
    _, wrapped = wrap(tmp_path, *wrapper, fields=fields)
    raw, config = with_draft_layer(wrapped, "*E" if existing else "*-")
    before = values(load(wrapped))
    expected = before | begun_draft_layer(config, before, 0)
    found = values(load(write_with_draft_layer(wrapped, tmp_path / "with_drafts", raw, config, expected)))
    assert found.keys() == expected.keys()
    assert not existing or any((found[path] != before[path]).any() for path in before if path.startswith("mtp."))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], np.asarray(value, found[path].dtype), rtol=1e-2, err_msg=path)


def test_a_tensor_of_no_tower_is_still_an_error(tmp_path):
    _, wrapped = wrap(tmp_path, "some_vl", "llm_config", "language_model.", "", ("adapter.x",))
    assert "1 unexpected: adapter.x [3]" in message(load, wrapped)
