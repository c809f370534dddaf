"""Safetensors files by memory map, single and in shards; and the digest of all of their bytes."""

import itertools
import json
import os
import struct
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.load import Checkpoint, load_model
from checkpoints.orbax import save_orbax
from checkpoints.random import write_random
from checkpoints.tensors import file_digest
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.safetensors_file import SafetensorsFile
from checkpoints.tensors.tensor_set import TensorSet
from tests.checkpoints.checks import message
from tests.support.models.tiny_configs import CHECKPOINT

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


def test_dtype_without_support_is_an_error_only_when_used(tmp_path):
    header = b'{"w": {"dtype": "F6_E3M2", "shape": [4], "data_offsets": [0, 4]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert message(file.view, "w") == f"{file.path}: w has dtype F6_E3M2, which is not supported yet"


SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def write(directory, tensors, *names, indexed=False):
    """Divide tensors over files."""
    directory.mkdir(exist_ok=True)
    files = dict(zip(sorted(tensors), itertools.cycle(names), strict=False))
    for name in names:
        save_file({key: tensors[key] for key, file in files.items() if file == name}, directory / name)
    if indexed:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


@pytest.mark.parametrize("indexed", [True, False])
def test_shards(tmp_path, indexed):
    tensors = TensorSet(write(tmp_path, TENSORS, *SHARDS, indexed=indexed))
    assert tensors.names == TENSORS.keys()
    assert tensors.names is tensors.names, "a copy for each question makes reading quadratic"
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(tensors.view(name), expected)
        assert (tensors.view(name).dtype, tensors.shape(name)) == (expected.dtype, expected.shape)
    assert tensors.dtype("b") == "BF16"
    for file in tmp_path.glob("model-*"):
        file.unlink()
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert TensorSet(tmp_path).names == TENSORS.keys()


@pytest.mark.parametrize("indexed", [True, False])
def test_missing_shards(tmp_path, indexed):
    (write(tmp_path, TENSORS, *SHARDS, indexed=indexed) / SHARDS[1]).unlink()
    assert message(TensorSet, tmp_path) == f"{tmp_path}: missing 1 of 3 shards: {SHARDS[1]}"


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
    assert "cannot be read (File name too long)" in message(TensorSet, tmp_path / ("x" * 300))
    (tmp_path / "pytorch_model.bin").touch()
    hint = "only safetensors weights can be read, convert the .bin files first: transformers' from_pretrained"
    assert message(TensorSet, tmp_path) == f"{tmp_path}: has no *.safetensors file; {hint}, then save_pretrained"


@pytest.fixture
def directory(tmp_path):
    return write_random(tmp_path / "tiny", CHECKPOINT)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mamba-jax" / "weights"


def digest(ref, **options):
    return Checkpoint(ref, **options).load_identified(progress=False).digest


def hashed(directory):
    """The digest of a directory's tensors, and how many bytes were hashed for it."""
    with FileHasher() as hasher:
        TensorSet(directory, hasher)
        return hasher.digest(), hasher.hashed_bytes


@pytest.fixture
def settled(directory, monkeypatch):
    """A directory whose files' times tell whether they change again, as if that took a moment and not two seconds."""
    monkeypatch.setattr(file_digest, "_SETTLED", 0.1)
    time.sleep(0.15)
    return directory


def test_every_value_counts(directory):
    """A sample of values, as was once used, does not see most changes."""
    before = digest(directory)
    assert digest(directory) == before
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].size)
    seen = {before}
    for at in (1, tensors[name].size // 2 + 1, tensors[name].size - 1):
        changed = tensors[name].copy()
        changed.reshape(-1)[at] += 1
        save_file(tensors | {name: changed}, file)
        seen.add(digest(directory))
    assert len(seen) == 4


def test_how_weights_are_converted_counts(directory):
    seen = [digest(directory, **options) for options in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"})]
    seen += [digest(directory, load_format="dummy", seed=seed) for seed in (1, 2)]
    assert len(set(seen)) == 5
    assert digest(directory, load_format="dummy", seed=1) == seen[3]


def test_the_same_tensors_in_other_files_are_the_same(tmp_path):
    tensors = {f"w{i}": np.arange(i + 5, dtype=np.float32) for i in range(6)}
    one = write(tmp_path / "one", tensors, "model.safetensors")
    two = write(tmp_path / "two", tensors, "model-1-of-2.safetensors", "model-2-of-2.safetensors")
    assert hashed(one)[0] == hashed(two)[0]
    renamed = write(tmp_path / "renamed", {f"v{name}": array for name, array in tensors.items()}, "model.safetensors")
    shaped = write(tmp_path / "shaped", tensors | {"w1": tensors["w1"].reshape(2, 3)}, "model.safetensors")
    typed = write(tmp_path / "typed", tensors | {"w1": tensors["w1"].view(np.int32)}, "model.safetensors")
    assert len({hashed(each)[0] for each in (one, renamed, shaped, typed)}) == 4


def test_a_file_is_hashed_once(settled, cache):
    first, size = hashed(settled)
    assert size == sum(tensor.nbytes for tensor in load_file(settled / "model.safetensors").values())
    assert hashed(settled) == (first, 0)
    (kept,) = cache.iterdir()
    for damage in ("{", "[]", "null", json.dumps(json.loads(kept.read_text()) | {"digests": {"w": "0"}})):
        kept.write_text(damage)
        assert hashed(settled) == (first, size)


def test_a_file_that_changed_is_hashed_again_even_with_its_old_time(settled):
    file, (first, size) = settled / "model.safetensors", hashed(settled)
    before = file.stat()
    with file.open("r+b") as changed:
        changed.seek(-2, os.SEEK_END)
        changed.write(b"\x12\x34")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    second, again = hashed(settled)
    assert (second != first, again) == (True, size)


def test_a_file_that_changed_just_now_is_not_remembered(directory, cache):
    """Within the resolution of its times it may change again unnoticed."""
    (directory / "model.safetensors").touch()
    hashed(directory)
    assert not cache.exists() or not any(cache.iterdir())


def test_a_file_that_changes_while_it_is_loaded_is_refused(directory):
    with FileHasher() as hasher:
        TensorSet(directory, hasher)
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x07")
        os.utime(directory / "model.safetensors", ns=(1, 1))
        assert "was changed while it was loaded" in message(hasher.digest)


def test_without_a_place_to_remember_it_hashes_each_time(settled, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hashed(settled) == hashed(settled)
    assert hashed(settled)[1] > 0


def test_orbax_weights_have_a_digest(directory, tmp_path):
    model = load_model(directory, progress=False)
    stored = save_orbax(tmp_path / "stored", model)
    before = digest(stored)
    assert digest(stored) == before
    other = save_orbax(tmp_path / "other", load_model(directory, progress=False, load_format="dummy"))
    assert digest(other) != before
