"""Safetensors files by memory map, single and in shards."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.tensors.safetensors_file import SafetensorsFile
from checkpoints.tensors.tensor_set import TensorSet
from tests.checkpoints.checks import message

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(8).reshape(4, 2).astype(ml_dtypes.bfloat16),
    "c": np.array([1.5, -2], np.float16),
    "none": np.zeros((0, 3), np.float32),
    "scalar": np.array(7, np.int64),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_views_equal_what_was_written(path):
    file = SafetensorsFile(path)
    assert file.entries.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        view = file.view(name)
        assert view.dtype == expected.dtype
        np.testing.assert_array_equal(view, expected)


def test_views_are_maps_of_the_file_not_copies(path):
    view = SafetensorsFile(path).view("a")
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert not view[1:].flags.owndata
    content = bytearray(path.read_bytes())
    at = content.index(np.float32(5).tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.float32(50).tobytes())
    assert view[1, 2] == 50


def test_a_released_tensor_can_be_read_again(path):
    file = SafetensorsFile(path)
    for name in TENSORS:
        file.release(name)
    np.testing.assert_array_equal(file.view("a"), TENSORS["a"])


def test_truncated_data(path):
    content = path.read_bytes()
    path.write_bytes(content[:-40])
    text = message(SafetensorsFile, path)
    assert text.startswith(f"{path}: truncated ({len(content) - 40} of {len(content)} bytes); incomplete: ")
    assert "a [2, 3]" in text


@pytest.mark.parametrize("size", [0, 5, 8, 60])
def test_truncated_header(path, size):
    path.write_bytes(path.read_bytes()[:size])
    end = f"truncated, or not a safetensors file ({size} bytes, too short for its header)"
    assert message(SafetensorsFile, path) == f"{path}: {end}"


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        {"a": {"dtype": "F32"}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
    ],
)
def test_corrupt_header(tmp_path, header):
    path = header_file(tmp_path / "x.safetensors", header, b"1234")
    assert message(SafetensorsFile, path).startswith(f"{path}: corrupt safetensors header (")


def test_dtype_without_support_is_an_error_only_when_used(tmp_path):
    header = {"w": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 4]}}
    file = SafetensorsFile(header_file(tmp_path / "x.safetensors", header, b"1234"))
    assert message(file.view, "w") == f"{file.path}: w has dtype F6_E3M2, which is not supported yet"


def shards(directory, indexed=True, count=3):
    names = list(TENSORS)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = names[i::count]
        save_file({name: TENSORS[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    if indexed:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("indexed", [True, False])
def test_shards(tmp_path, indexed):
    shards(tmp_path, indexed)
    tensors = TensorSet(tmp_path)
    assert tensors.names == TENSORS.keys()
    assert tensors.names is tensors.names, "a copy for each question makes reading quadratic"
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(tensors.view(name), expected)
        assert tensors.shape(name) == expected.shape
    assert tensors.dtype("b") == "BF16"


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shards(tmp_path, indexed):
    shards(tmp_path, indexed)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    expected = f"{tmp_path}: missing 1 of 3 shards: model-00002-of-00003.safetensors"
    assert message(TensorSet, tmp_path) == expected


NO_MAP = "has no weight_map of tensor names to file names"


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{}", NO_MAP),
        ('{"weight_map": []}', NO_MAP),
        ('{"weight_map": {"a": 1}}', NO_MAP),
        ('{"weight_map": {"a": "../x.safetensors"}}', "names files outside its directory"),
        ('{"weight_map": {', "not valid JSON (Expecting property name"),
    ],
)
def test_wrong_indices(tmp_path, index, said):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert message(TensorSet, tmp_path).startswith(f"{tmp_path}/model.safetensors.index.json: {said}")


def test_no_weights(tmp_path):
    assert message(TensorSet, tmp_path) == f"{tmp_path}: has no *.safetensors file"
    (tmp_path / "pytorch_model.bin").touch()
    hint = "only safetensors weights can be read, convert the .bin files first: transformers' from_pretrained"
    assert message(TensorSet, tmp_path) == f"{tmp_path}: has no *.safetensors file; {hint}, then save_pretrained"
