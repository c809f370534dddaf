"""Adapters on disk: what is read, what is refused with one line that names it, and what is written as PEFT does."""

import json
import math
import os
import re
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import load_config
from checkpoints.adapters import adapter
from checkpoints.adapters.adapter import CONFIG_FILE, MODULE_PREFIX, WEIGHTS_FILE, _targets_of, read_adapter
from checkpoints.adapters.adapter_export import target_layers, write_adapter
from checkpoints.adapters.initial_state import INITIAL_STATE_FILE
from checkpoints.errors import CheckpointError
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.adapters import adaptable_layers
from mamba_jax.model import HybridModel
from tests.checkpoints.checks import message
from tests.support.models.golden_case import FIXTURES

FIXTURE = FIXTURES / "nemotronh-moe"
CONFIG = load_config(FIXTURE)
IN_PROJ = "base_model.model.model.layers.2.mixer.in_proj"
LORA_A, LORA_B, MAGNITUDES = (f"{IN_PROJ}.lora_{part}" for part in ("A.weight", "B.weight", "magnitude_vector"))
HEAD = f"{MODULE_PREFIX}lm_head.weight"


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(FIXTURE / "adapter", tmp_path / "adapter")


def configure(directory, **fields):
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change(directory, change):
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_FILE)


@pytest.mark.parametrize("name", ["qwen35-moe", "qwen3next-dense"])
def test_parts_of_a_fused_projection_may_have_adapters_of_their_own(tmp_path, name):
    config, rng, parent = load_config(FIXTURES / name), np.random.default_rng(0), "model.layers.1.linear_attn.in_proj"
    sizes = {part: math.prod(_targets_of(config).targets[f"blocks.2.mixer.{part}_proj"].outputs) for part in "qkvzba"}
    modules = ["q", "kv", "z", "b", "a"] if name == "qwen35-moe" else ["qkv", "z", "a", "b"]
    tensors = {}
    for module in modules:
        outputs = sum(sizes[part] for part in module)
        for part, shape in (("A", (2, config.hidden_size)), ("B", (outputs, 2))):
            tensors[f"{MODULE_PREFIX}{parent}_{module}.lora_{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    layers = read_adapter(tmp_path, config).layers
    for module in modules:
        a, b = (tensors[f"{MODULE_PREFIX}{parent}_{module}.lora_{part}.weight"] for part in "AB")
        pairs = [layers[f"blocks.2.mixer.{part}_proj"] for part in module]
        np.testing.assert_array_equal(np.concatenate([own for _, own in pairs]), b)
        assert all((own == a).all() for own, _ in pairs)
    wrong = {key.replace("in_proj_z", "in_proj_qz"): value for key, value in tensors.items()}
    save_file(wrong, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"in_proj_qz has lora_A|no module .*in_proj_qz"):
        read_adapter(tmp_path, config)


def test_a_pattern_of_scales_may_be_a_whole_name(directory):
    plain = read_adapter(directory, CONFIG).layers["blocks.2.mixer.in_proj_dt"][1]
    configure(directory, alpha_pattern={r"^model\.layers\.2\.mixer\.in_proj$": 20})
    np.testing.assert_allclose(read_adapter(directory, CONFIG).layers["blocks.2.mixer.in_proj_dt"][1], plain * 4)


def test_the_digest_is_of_the_content(directory, tmp_path):
    first = read_adapter(directory, CONFIG).digest
    copy = shutil.copytree(directory, tmp_path / "copy")
    configure(copy, base_model_name_or_path="another name")
    assert read_adapter(copy, CONFIG).digest == first
    alpha = json.loads((copy / "adapter_config.json").read_text())["lora_alpha"]
    configure(copy, lora_alpha=2 * alpha)  # numbers of the same bits but for their exponents
    assert read_adapter(copy, CONFIG).digest != first
    change(directory, lambda tensors: tensors[LORA_A].__setitem__((0, 0), 1))
    assert read_adapter(directory, CONFIG).digest != first


@pytest.mark.parametrize("form", ["", ".modules_to_save", ".modules_to_save.default"])
def test_an_embedding_and_a_head_are_read_under_the_names_that_peft_gives_them(directory, form):
    before = read_adapter(directory, CONFIG)
    table = np.random.default_rng(0).normal(size=(509, 48)).astype(np.float32)
    names = {"embed": f"{MODULE_PREFIX}model.embeddings", "lm_head": f"{MODULE_PREFIX}lm_head"}
    change(directory, lambda tensors: tensors.update({f"{name}{form}.weight": table for name in names.values()}))
    configure(directory, modules_to_save=["lm_head", "embeddings"])
    read = read_adapter(directory, CONFIG)
    assert read.digest != before.digest
    assert read.num_parameters == before.num_parameters + 2 * table.size
    assert {name: np.array_equal(value, table) for name, value in read.tables.items()} == dict.fromkeys(names, True)


def test_tables_of_a_tied_model_stay_one(tmp_path):
    model = FIXTURES / "falconh1-norm"
    folder = shutil.copytree(model / "saved", tmp_path / "adapter")
    change(folder, lambda tensors: tensors.pop(next(name for name in tensors if "lm_head" in name)))
    configure(folder, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    read = read_adapter(folder, load_config(model))
    assert np.array_equal(read.tables["embed"], read.tables["lm_head"])


def refusal(path, max_rank=8):
    """The message for an adapter that is refused: one line that any client can be sent."""
    text = message(read_adapter, path, CONFIG, max_rank=max_rank)
    assert text.isprintable()
    return text


def renamed(old, new):
    def change(tensors):
        for name in list(tensors):
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def replaced(name, value):
    return lambda tensors: tensors.__setitem__(name, value.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (renamed("layers.2.mixer.in_proj", "layers.9.mixer.in_proj"), "no module model.layers.9.mixer.in_proj"),
        (renamed("layers.2.mixer.in_proj", "layers.2.mixer.gate"), "no module model.layers.2.mixer.gate"),
        (renamed("layers.2.mixer.in_proj", "layers.2.mixer.conv1d"), "conv1d is not a linear layer"),
        (renamed("layers.4.mixer.shared_experts", "layers.4.mixer.experts.1"), r"experts\.1\.\w+ has lora_A"),
        (renamed("model.layers.2.mixer.in_proj", "lm_head"), "lm_head is not a linear layer"),
        (lambda tensors: tensors.pop(LORA_A), "in_proj has no lora_A: A and B are needed"),
        (replaced(LORA_B, np.zeros((536, 3))), r"in_proj has lora_A .* expected \[3, 48\] and \[537"),
        (replaced(LORA_A, np.zeros((3, 47))), r"in_proj has lora_A \[3, 47\]"),
        (replaced(LORA_A, np.zeros((4, 48))), "rank 4, but the config says 3"),
        (replaced(LORA_A, np.full((3, 48), np.nan)), "in_proj has numbers that are not finite"),
        (replaced(LORA_B, np.full((537, 3), 3e38)), "in_proj has numbers that are not finite"),
        (replaced(MAGNITUDES, np.zeros(3)), r"magnitudes \[3\]: expected none without use_dora"),
        (replaced(HEAD, np.zeros((510, 48))), r"lm_head.* \[510, 48\]: .* cannot add tokens"),
        (replaced(HEAD, np.full((509, 48), np.nan)), "lm_head.weight has numbers"),
        (replaced(f"{MODULE_PREFIX}model.norm.weight", np.zeros(48)), "norm.weight is not supported"),
        (lambda tensors: tensors.clear(), "has no tensors of LoRA"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, r" has no magnitudes: expected \[\d+\]"),
        ({"modules_to_save": ["lm_head"]}, "has lm_head, .* no weight in the file; .* merge_and_unload"),
        ({"modules_to_save": 5}, "modules_to_save is '5', expected a list of names"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"new_method": {"a": 1}}, "new_method is"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base model's weights"),
        ({"r": 0}, "r is 0: a number above 0"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 1e40}, "lora_alpha is 1e.40: a number above 0"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": "16"}, "lora_alpha is 16: a number"),
        ({"alpha_pattern": {"in_proj": 1e39}}, r"alpha_pattern is 1e\+39"),
        ({"rank_pattern": [1]}, "rank_pattern is .*: an object"),
        ({"bias": {"a": []}}, "bias .* is not supported"),
        ({"peft_type": "\ud800"}, r"peft_type '\\ud800' is not supported"),
        ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern: .* expected a module's name"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused(directory, changed, message):
    """Tensors that a function changes, or fields of the config."""
    if callable(changed):
        change(directory, changed)
    else:
        configure(directory, **changed)
    assert re.search(message, refusal(directory))


def test_a_rank_above_the_limit_and_a_directory_without_an_adapter_are_refused(directory, tmp_path):
    assert "rank 3, more than max_lora_rank 2" in refusal(directory, max_rank=2)
    (directory / WEIGHTS_FILE).unlink()
    assert "has no adapter_model.safetensors" in refusal(directory)
    assert "not a directory" in refusal(tmp_path / "absent")


NESTED = ["[" * 100_000, '{"a":' * 100_000]
HEADERS = {
    "nested lists": NESTED[0],
    "nested objects": NESTED[1],
    "an endless size": '{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
    "an endless offset": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}',
    "a huge size": '{"a": {"dtype": "F32", "shape": [0, 1%s], "data_offsets": [0, 0]}}' % ("0" * 30),
    "a list as dtype": '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    "sizes that are no numbers": '{"a": {"dtype": "F32", "shape": [[1]], "data_offsets": [0, 4]}}',
    "half of a pair": '{"\\ud800": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}',
    "a line break": '{"a\\nb": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}',
    "metadata that is no object": '{"__metadata__": [1, 2]}',
    "no JSON": "{not json",
    "no object": "[]",
    "no shape": '{"a": {"dtype": "F32"}}',
    "another size": '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    "an offset before the file": '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
    "a number of 5000 digits": '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % ("9" * 5000),
}


@pytest.mark.parametrize("file", [WEIGHTS_FILE, INITIAL_STATE_FILE])
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_hostile_headers_are_refused(directory, header, file):
    (directory / file).write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(4))
    refusal(directory)


@pytest.mark.parametrize(
    "text",
    [*NESTED, '{"r": {"__float__": [1]}}', '{"r": %s}' % ("9" * 5000), "\0", "NaN", '"\\ud800"'],
    ids=["lists", "objects", "float of a list", "digits", "zero", "NaN", "half"],
)
def test_hostile_configs_are_refused(directory, text):
    (directory / CONFIG_FILE).write_text(text)
    refusal(directory)


@pytest.mark.parametrize("path", ["x" * 300_000, "/" + "x/" * 5000, "a\0b", "\ud800", "~unknown-user/a", "a\nb"])
def test_impossible_paths_are_refused(path):
    refusal(path)


@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE, INITIAL_STATE_FILE])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "huge"])
def test_only_regular_files_of_a_bounded_size_are_read(directory, file, kind):
    path = directory / file
    path.unlink(missing_ok=True)
    if kind in ("device", "loop"):
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    else:
        {"pipe": os.mkfifo, "folder": os.mkdir, "huge": Path.touch}[kind](path)
    if kind == "huge":
        os.truncate(path, 64 << 30)
    refusal(directory)


def test_no_number_of_a_wrong_tensor_is_read(directory):
    """A file can be sparse: what its tensors' names and shapes do not allow is refused before memory is needed."""
    form, begins = {"dtype": "F32", "shape": [3, 1 << 32]}, {LORA_A: 0, LORA_B: 12}
    header = {name: form | {"data_offsets": [at << 32, (at + 12) << 32]} for name, at in begins.items()}
    text = json.dumps(header).encode()
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + (24 << 32))
    assert "expected [3, 48]" in refusal(directory)


def test_a_file_that_becomes_shorter_is_refused(directory, monkeypatch):
    sound = adapter._pairs

    def shortened(stored, tables):
        found = sound(stored, tables)
        os.truncate(stored.path, 2000)
        return found

    monkeypatch.setattr(adapter, "_pairs", shortened)
    assert "was changed while it was loaded" in refusal(directory)


# Shared blocks are refused.
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/adapter") if path.parent.name != "zamba2")


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_names_and_shapes_that_peft_gives_them_and_are_read_back(name, tmp_path):
    config = load_config(FIXTURES / name)
    layers, rng = adaptable_layers(HybridModel.abstract(config)), np.random.default_rng(0)
    modules = {}
    for path, module in target_layers(config).items():
        *outputs, inputs = layers[path].weight.shape
        a, parts = modules.setdefault(module, (rng.normal(size=(3, inputs)).astype(np.float32), {}))
        parts[path] = rng.normal(size=(math.prod(outputs), len(a))).astype(np.float32)
    write_adapter(tmp_path, modules, config, alpha=3.0)

    by_peft = SafetensorsFile(FIXTURES / name / "adapter" / "adapter_model.safetensors").entries
    written = SafetensorsFile(tmp_path / "adapter_model.safetensors").entries
    assert all(tensor.startswith(MODULE_PREFIX) for tensor in written)
    # PEFT takes the names of this fixture's MLPs for those of experts: its adapter has none.
    assert name == "qwen3next-dense" or written.keys() == by_peft.keys()
    rows = {tensor: entry.shape[0] for tensor, entry in by_peft.items() if "lora_B" in tensor}
    assert {tensor: written[tensor].shape[0] for tensor in rows} == rows

    read = read_adapter(tmp_path, config)
    assert read.layers.keys() == layers.keys()
    for a, parts in modules.values():
        for path, b in parts.items():
            np.testing.assert_array_equal(read.layers[path][0], a, err_msg=path)
            np.testing.assert_allclose(read.layers[path][1], b, rtol=1e-6, err_msg=path)
