"""Weights are identified by all of their bytes, and each file is hashed once."""

import json
import os
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError
from checkpoints.load import load_weights
from checkpoints.orbax import save_orbax
from checkpoints.random import write_random
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.tensor_set import TensorSet
from tests.support.models.tiny_configs import CHECKPOINT


@pytest.fixture
def directory(tmp_path):
    return write_random(tmp_path / "tiny", CHECKPOINT)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mamba-jax" / "weights"


def digest(ref, **options):
    return load_weights(ref, progress=False, **options).digest


def hashed(directory):
    """The digest of a directory's tensors, and how many bytes were hashed for it."""
    with FileHasher() as hasher:
        TensorSet(directory, hasher)
        return hasher.digest(), hasher.hashed_bytes


def settle(directory):
    """Wait until the files' times tell whether they change again."""
    newest = max(path.stat().st_ctime for path in directory.glob("*.safetensors"))
    time.sleep(max(0.0, newest + 2.1 - time.time()))


def write(directory, tensors, *names):
    """Divide tensors over files."""
    directory.mkdir(exist_ok=True)
    keys = sorted(tensors)
    for at, name in enumerate(names):
        save_file({key: tensors[key] for key in keys[at :: len(names)]}, directory / name)
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


def test_a_file_is_hashed_once(directory, cache):
    settle(directory)
    first, size = hashed(directory)
    assert size == sum(tensor.nbytes for tensor in load_file(directory / "model.safetensors").values())
    assert hashed(directory) == (first, 0)
    (kept,) = cache.iterdir()
    for damage in ("{", "[]", "null", json.dumps(json.loads(kept.read_text()) | {"digests": {"w": "0"}})):
        kept.write_text(damage)
        assert hashed(directory) == (first, size)


def test_a_file_that_changed_is_hashed_again_even_with_its_old_time(directory):
    settle(directory)
    file, (first, size) = directory / "model.safetensors", hashed(directory)
    before = file.stat()
    with file.open("r+b") as changed:
        changed.seek(-2, os.SEEK_END)
        changed.write(b"\x12\x34")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    second, again = hashed(directory)
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
        with pytest.raises(CheckpointError, match="was changed while it was loaded"):
            hasher.digest()


def test_without_a_place_to_remember_it_hashes_each_time(directory, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    settle(directory)
    assert hashed(directory) == hashed(directory)
    assert hashed(directory)[1] > 0


def test_orbax_weights_have_a_digest(directory, tmp_path):
    model = load_weights(directory, progress=False).model
    stored = save_orbax(tmp_path / "stored", model)
    before = digest(stored)
    assert digest(stored) == before
    largest = max((stored / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    other = save_orbax(tmp_path / "other", load_weights(directory, progress=False, load_format="dummy").model)
    assert largest.is_file()
    assert digest(other) != before


def test_tensors_of_types_that_numpy_lacks_are_hashed(tmp_path):
    arrays = {"w": np.ones((3, 4), ml_dtypes.bfloat16)}
    assert hashed(write(tmp_path / "wide", arrays, "model.safetensors"))[1] == 24
