"""From stored tensors or random numbers to placed parameters, and what that takes on the host."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from checkpoints import placing
from checkpoints import random as random_weights
from checkpoints.placing import place
from checkpoints.random import PERIOD, DummyParameter, dummy_parameters, write_random
from checkpoints.tensors.hugging_face import read_parameters
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.families.base import HFSource
from tests.checkpoints.checks import message
from tests.support.models.quantized_checkpoints import METHODS, config_of, write_quantized
from tests.support.models.tiny_configs import CHECKPOINT

RNG = np.random.default_rng(0)
STORED = {
    "m.in_proj": RNG.normal(size=(10, 4)).astype(np.float32),
    "m.conv": RNG.normal(size=(6, 1, 3)).astype(ml_dtypes.bfloat16),
    **{f"m.experts.{e}.up": RNG.normal(size=(2, 4)).astype(np.float32) for e in range(4)},
    **{f"m.experts.{e}.{part}": RNG.normal(size=(3, 4)).astype(np.float32) for e in range(4) for part in "ab"},
    "m.by_heads": RNG.normal(size=(2 * 5, 4)).astype(np.float32),
}
F32 = np.dtype(np.float32)
PARAMETERS = {
    "zx": jax.ShapeDtypeStruct((2, 2, 4), F32),
    "rest": jax.ShapeDtypeStruct((6, 4), ml_dtypes.bfloat16),
    "conv": jax.ShapeDtypeStruct((6, 3), F32),
    "experts": jax.ShapeDtypeStruct((4, 2, 4), F32),
    "pairs": jax.ShapeDtypeStruct((4, 2, 3, 4), F32),
    "q": jax.ShapeDtypeStruct((4, 4), F32),
    "joined": jax.ShapeDtypeStruct((6, 4), ml_dtypes.bfloat16),
    "k": jax.ShapeDtypeStruct((6, 4), F32),
}
SOURCES = {
    "zx": HFSource(("m.in_proj",), (0, 4), (10, 4)),
    "rest": HFSource(("m.in_proj",), (4, 10), (10, 4)),
    "conv": HFSource(("x.conv",), None, (6, 1, 3), alternatives=(HFSource(("m.conv",), None, (6, 1, 3)),)),
    "experts": HFSource(tuple(f"m.experts.{e}.up" for e in range(4)), stack=True),
    "pairs": HFSource(tuple(f"m.experts.{e}.{x}" for e in range(4) for x in "ab"), stored_shape=(3, 4), stack=True),
    "q": HFSource(("m.by_heads",), (0, 2), (10, 4), pieces=2),
    "joined": HFSource(("m.experts.0.a", "m.experts.0.b"), stored_shape=(3, 4), stack=True),
    "k": HFSource(("m.by_heads",), (2, 5), (10, 4), pieces=2),
}
EXPECTED = {
    "zx": STORED["m.in_proj"][:4].reshape(2, 2, 4),
    "rest": STORED["m.in_proj"][4:].astype(ml_dtypes.bfloat16),
    "conv": STORED["m.conv"][:, 0].astype(np.float32),
    "experts": np.stack([STORED[f"m.experts.{e}.up"] for e in range(4)]),
    "pairs": np.stack([[STORED[f"m.experts.{e}.{part}"] for part in "ab"] for e in range(4)]),
    "q": STORED["m.by_heads"][[0, 1, 5, 6]],
    "joined": np.concatenate([STORED["m.experts.0.a"], STORED["m.experts.0.b"]]).astype(ml_dtypes.bfloat16),
    "k": STORED["m.by_heads"][[2, 3, 4, 7, 8, 9]],
}


def read(directory, stored=STORED, **options):
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors")
    return read_parameters("here", TensorSet(directory), PARAMETERS, SOURCES, **options)


def check(arrays):
    assert arrays.keys() == EXPECTED.keys()
    for path, expected in EXPECTED.items():
        assert arrays[path].dtype == PARAMETERS[path].dtype
        np.testing.assert_array_equal(np.asarray(arrays[path]), expected)


@pytest.mark.parametrize("leftovers", [{}, {"old.buffer": np.zeros(2, np.float32)}])
def test_rows_reshapes_stacks_alternatives_and_dtypes(tmp_path, leftovers):
    check(read(tmp_path, STORED | leftovers, ignored=[r"old\..*"]))


@pytest.mark.parametrize("devices", [2, 4])
def test_sharded_equals_single(tmp_path, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("shard",))
    specs = {"zx": PartitionSpec(None, None, "shard"), "experts": PartitionSpec("shard"), "rest": PartitionSpec()}
    specs |= {"pairs": PartitionSpec("shard"), "q": PartitionSpec("shard")}
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    arrays = read(tmp_path, shardings=shardings.get)
    check(arrays)
    assert {path: arrays[path].sharding for path in shardings} == shardings
    assert len(arrays["conv"].sharding.device_set) == 1
    everywhere = NamedSharding(mesh, PartitionSpec())
    arrays = read(tmp_path, shardings=everywhere)
    check(arrays)
    assert all(array.sharding == everywhere for array in arrays.values())


def test_only_the_pieces_of_a_shard_are_asked_for():
    asked = []

    def values(index):
        asked.append(index[0].indices(4)[:2])
        return np.zeros((2, 2), np.float32)

    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("shard",)), PartitionSpec("shard"))
    place(jax.ShapeDtypeStruct((4, 2), F32), values, sharding)
    assert sorted(asked) == [(0, 2), (2, 4)]


@pytest.mark.parametrize("sharded", [True, False])
def test_parameters_do_not_alias_what_was_read(sharded):
    """Memory that a file is mapped to may change; 64-byte alignment is what lets JAX alias on CPU."""
    raw = np.zeros(64 * 64 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    source = raw[start : start + 64 * 64].view(np.float32).reshape(16, 64)
    mesh = Mesh(np.array(jax.devices()[:2]), ("shard",))
    sharding = NamedSharding(mesh, PartitionSpec("shard")) if sharded else None
    array = place(jax.ShapeDtypeStruct((16, 64), F32), lambda index: source[index], sharding)
    source[...] = 1
    np.testing.assert_array_equal(np.asarray(array), 0)


def test_everything_wrong_is_listed_in_one_line(tmp_path):
    stored = dict(STORED)
    del stored["m.experts.2.up"], stored["m.conv"]
    stored["m.in_proj"] = np.zeros((10, 5), np.float32)
    stored["extra"] = np.zeros((3, 1), np.float32)
    assert message(read, tmp_path, stored) == (
        "here: tensors do not fit config.json: 2 missing: m.conv [6, 1, 3], m.experts.2.up [2, 4]; "
        "1 of the wrong shape: m.in_proj is [10, 5], expected [10, 4]; 1 unexpected: extra [3, 1]"
    )


def test_long_lists_are_cut(tmp_path):
    text = message(read, tmp_path, STORED | {f"extra.{i:03d}": np.zeros(1, np.float32) for i in range(500)})
    assert text.endswith("500 unexpected: " + ", ".join(f"extra.{i:03d} [1]" for i in range(6)) + ", and 494 more")


def test_loading_says_how_far_it_is_without_a_terminal(monkeypatch, caplog):
    monkeypatch.setattr(placing, "LINE_EVERY", -1.0)
    caplog.set_level(logging.INFO, logger="checkpoints")
    with placing.progress_bar("Loading it", 3_000_000_000, True) as advance:
        advance(1_500_000_000)
    assert caplog.messages == ["Loading it: 1.5 of 3.0 GB"]


SHAPE = (6, 601, 512)


def parameter(dtype, path="blocks.1.mixer.experts.up", shape=SHAPE):
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(PERIOD, np.float32), rng.random(PERIOD, np.float32)
    return DummyParameter(path, shape, dtype, *drawn, False)


@pytest.mark.parametrize("spec", [None, ("model",), (None, None, "model")])
def test_devices_repeat_what_the_host_makes(spec):
    made = parameter(jnp.bfloat16)
    want = made((slice(None),) * 3)
    assert want.size > PERIOD
    sharding = None
    if spec is not None:
        sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), PartitionSpec(*spec))
    found = made.on_devices(sharding)
    assert (found.shape, found.dtype) == (SHAPE, jnp.bfloat16)
    assert sharding is None or found.sharding == sharding
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("path", ["blocks.0.mixer.dt_bias", "blocks.0.mixer.a_log", "blocks.0.norm.weight"])
def test_small_parameters_do_not_repeat(path):
    made = parameter(jnp.float32, path, (24,))
    want = made((slice(None),))
    assert len(np.unique(want)) == 24
    np.testing.assert_array_equal(made.on_devices(None), want)


def test_accelerators_make_their_own_weights(monkeypatch):
    targets = {"blocks.3.mixer.up_proj.weight": jax.ShapeDtypeStruct((3, 5), jnp.float32)}
    want = dummy_parameters(targets)
    monkeypatch.setattr(random_weights, "_platform", lambda sharding: "gpu")
    monkeypatch.setattr(random_weights, "place", lambda *arguments: pytest.fail("the host made a parameter"))
    np.testing.assert_array_equal(*(it["blocks.3.mixer.up_proj.weight"] for it in (want, dummy_parameters(targets))))


WIDE = CHECKPOINT | {"hidden_size": 512, "vocab_size": 24_000, "n_routed_experts": 64}
SIZES = {"hidden_size": 512, "n_routed_experts": 32, "moe_intermediate_size": 768, "vocab_size": 1024}
SLACK = 8e6
"""Of the allocator, and of a bar, threads and the like."""
MEASURE = """
import sys, jax, checkpoints
from mamba_jax.model import parameters
def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) * 1024
kind = sys.argv[2] or None
checkpoints.load_model("demo", quantization=kind, progress=False)
before = status("VmRSS")
# Sets the high-water mark back.
open("/proc/self/clear_refs", "w").write("5")
model = checkpoints.load_model(sys.argv[1], quantization=kind, progress=False)
sizes = [leaf.get_value().nbytes for leaf in parameters(model).values()]
print(sum(sizes), max(sizes), status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
@pytest.mark.full
@pytest.mark.parametrize("kind", ["", "modelopt FP8", "int8"])
def test_peak_is_the_model_and_one_tensor(kind, tmp_path):
    config, quantization = config_of("moe") | SIZES, ""
    if kind in METHODS:
        description, formats = METHODS[kind]
        directory = write_quantized(tmp_path, config, formats, description)[0]
    else:
        quantization = kind
        directory = write_random(tmp_path / "wide", config if kind else WIDE, dtype="bfloat16")
    command = [sys.executable, "-c", MEASURE, str(directory), quantization]
    # Tensors of a real model are so large that the allocator gives them back as soon as they are freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    model, largest, peak = map(int, run.stdout.split())
    if not kind:
        largest //= 2  # a wide tensor is copied from its map, with 16 bits for each number
    assert 4 * largest < model
    assert peak < model + largest + SLACK, f"{peak / 1e6:.1f} MB for {model / 1e6:.1f} and {largest / 1e6:.1f}"
