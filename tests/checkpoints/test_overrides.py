"""`hf_overrides`: fields that replace those of config.json."""

import json

import pytest

import checkpoints
from checkpoints.load import load_config, load_weights
from checkpoints.overrides import merged, parse_overrides
from checkpoints.random import write_random
from mamba_jax.config import need
from tests.support.models.tiny_configs import CHECKPOINT

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
QWEN = {
    "model_type": "qwen3_5_text",
    "max_position_embeddings": 262144,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
WRAPPED = {"model_type": "qwen3_5", "text_config": QWEN, "tie_word_embeddings": True}


def config_of(tmp_path, raw, overrides):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_config(tmp_path, hf_overrides=overrides)


@pytest.mark.parametrize("raw", [QWEN, WRAPPED, WRAPPED | {"text_config": {**QWEN, "model_type": "qwen3_5_text"}}])
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
    config = config_of(tmp_path, raw, {"rope_theta": 5e6})
    assert need(need(config.attention).rope).theta == 5e6


def test_the_spelling_of_config_json_is_used():
    assert merged({"rope_scaling": {"type": "linear", "a": 1}}, {"rope_parameters": {"rope_type": "yarn"}}) == {
        "rope_scaling": {"type": "yarn", "a": 1}
    }
    assert merged({"rope_scaling": None}, {"rope_parameters": {"b": 1}})["rope_parameters"] == {"b": 1}
    assert merged({"torch_dtype": "float32"}, {"dtype": "bfloat16"}) == {"torch_dtype": "bfloat16"}
    assert merged({"a": {"b": 1}}, {"a": None}) == {"a": None}


def test_dotted_keys_are_nested_fields():
    assert parse_overrides({"c": 1, "a.b.c": 2, "a": {"b.d": 3}}) == {"a": {"b": {"c": 2, "d": 3}}, "c": 1}
    one, other = parse_overrides({"b": 1, "a": {"d": 1, "c": 2}}), parse_overrides('{"a.c": 2, "a.d": 1, "b": 1}')
    assert json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("{", "hf_overrides: not JSON"),
        ("[1]", r"hf_overrides: a JSON object is expected, not \[1\]"),
        ("[" * 100_000, "hf_overrides: nested too deeply"),
        ({"a." * 100_000: 1}, "hf_overrides: nested too deeply"),
        ({"text_config": 3}, "text_config is 3: an object is expected"),
        ({"hidden_size": "big"}, "hidden_size is 'big': a whole number is expected"),
        ({"model_type": "x"}, "model_type 'x' is not supported"),
    ],
)
@pytest.mark.parametrize("model", ["demo", "nemotron-h-8b"])
def test_wrong_overrides_are_refused(model, overrides, message):
    with pytest.raises(checkpoints.CheckpointError, match=message):
        load_config(model, hf_overrides=overrides)


def test_a_published_size_takes_overrides():
    assert load_config("nemotron-h-8b", hf_overrides={"layer_norm_epsilon": 0.5}).norm_eps == 0.5
    assert load_config("nemotron-h-8b").norm_eps != 0.5


def test_an_orbax_directory_refuses_overrides(tmp_path):
    (tmp_path / "mamba_jax.json").write_text("{}")
    with pytest.raises(checkpoints.CheckpointError, match="an Orbax directory does not use"):
        load_config(tmp_path, hf_overrides={"a": 1})


def test_overrides_are_part_of_the_digest_of_weights(tmp_path):
    directory = write_random(tmp_path / "tiny", CHECKPOINT)
    overrides = [None, {"layer_norm_epsilon": 0.5}, {"norm_eps": 0.5}, {"not_a_field": 1}, {"not_a_field": 2}]
    digests = [load_weights(directory, progress=False, hf_overrides=each).digest for each in overrides]
    assert len(set(digests)) == len(overrides)
    assert load_weights(directory, progress=False, hf_overrides={}).digest == digests[0]
    assert load_weights(directory, progress=False, hf_overrides='{"not_a_field": 2}').digest == digests[4]


def test_the_loaded_model_has_the_overridden_config(tmp_path):
    directory = write_random(tmp_path / "tiny", CHECKPOINT)
    model = checkpoints.load_model(directory, progress=False, hf_overrides={"layer_norm_epsilon": 0.5})
    assert model.config.norm_eps == 0.5
