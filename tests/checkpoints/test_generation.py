"""`generation_config.json`."""

import json

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.generation import GenerationConfig, read_generation_config


def write(directory, name, content):
    (directory / name).write_text(json.dumps(content))


def test_all_fields(tmp_path):
    fields = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    write(
        tmp_path,
        "generation_config.json",
        {**fields, "eos_token_id": [2, 11, 2], "max_new_tokens": 7, "do_sample": True},
    )
    assert read_generation_config(tmp_path) == GenerationConfig(eos_token_ids=(2, 11), max_new_tokens=7, **fields)


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


def test_do_sample_false_means_greedy(tmp_path):
    write(tmp_path, "generation_config.json", {"do_sample": False, "temperature": 1.0})
    assert read_generation_config(tmp_path).temperature == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"eos_token_id": "x"}, "eos_token_id must be an integer or a list of integers, not 'x'"),
    ],
)
def test_wrong_kinds(tmp_path, fields, message):
    write(tmp_path, "generation_config.json", fields)
    with pytest.raises(CheckpointError) as error:
        read_generation_config(tmp_path)
    assert str(error.value) == f"{tmp_path}/generation_config.json: {message}"
