"""Quantized checkpoints: each format says what the weights say that it stands for by its published definition."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints import CheckpointError
from checkpoints.quantized import packing
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.modules.quantized import quantized_weights
from tests.checkpoints.checks import assert_equal, load, values
from tests.support.models.golden_case import full_log_probs
from tests.support.models.quantized_checkpoints import (
    CONFIGS,
    METHODS,
    config_of,
    fp8,
    write_mixed,
    write_quantized,
)

TOLERANCE = 2e-4


def assert_stands_for(quantized, wide, *, narrow=True):
    """A quantized checkpoint has the weights of the wide one, and keeps some of them narrow."""
    few, expected = values(load(quantized)), values(load(wide))
    found = quantized_weights(few)
    assert bool(found) == narrow
    for path, value in expected.items():
        got = found[path].dequantize() if path in found else few[path]
        assert got.shape == value.shape
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-7, err_msg=path)


def written(tmp_path, model, method):
    description, formats = METHODS[method]
    if model == "granite" and ("GPTQ" in method or method == "AWQ" or "INT4" in method):
        # Its experts are three-dimensional tensors, which these formats do not have.
        formats = {
            pattern.replace("(in|out)put_linear", "shared_mlp.(in|out)put_linear"): f for pattern, f in formats.items()
        }
    return write_quantized(tmp_path, config_of(model), formats, description)


@pytest.mark.smoke("method")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", CONFIGS)
def test_weights_are_those_that_the_format_stands_for(tmp_path, model, method):
    assert_stands_for(*written(tmp_path, model, method), narrow=method != "GPTQ act-order")


@pytest.mark.smoke
@pytest.mark.parametrize("method", ["modelopt NVFP4", "compressed FP8 block", "AWQ", "compressed INT8"])
@pytest.mark.parametrize("model", CONFIGS)
def test_says_what_the_wide_weights_say(tmp_path, model, method):
    narrow, wide = (load(directory) for directory in written(tmp_path, model, method))
    prompts = [np.random.default_rng(0).integers(0, 250, 40)]
    for got, expected in zip(full_log_probs(narrow, prompts), full_log_probs(wide, prompts), strict=True):
        assert np.abs(got - expected).max() <= TOLERANCE


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The directories of the mixed checkpoint: as it is, and wide."""
    return write_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture
def changeable(mixed, tmp_path):
    """A copy of the mixed checkpoint's tensors, and what writes them into a directory."""
    config = (mixed[0] / "config.json").read_text()

    def write(tensors, **fields):
        (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | fields))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    tensors = TensorSet(mixed[0])
    return {name: np.array(tensors.view(name)) for name in tensors.names}, write


def test_each_weight_of_a_mixed_checkpoint_keeps_its_format(mixed):
    few = values(load(mixed[0]))
    assert few["blocks.1.mixer.experts.up.values"].dtype == ml_dtypes.float4_e2m1fn
    assert few["blocks.1.mixer.experts.up.group_scale"].dtype == ml_dtypes.float8_e4m3fn
    assert few["blocks.1.mixer.shared.up_proj.weight.values"].dtype == ml_dtypes.float8_e4m3fn
    assert few["blocks.0.mixer.in_proj_zx.weight.channel_scale"].shape == (2, 128)
    assert few["blocks.3.mixer.q_proj.weight"].dtype == np.float32
    assert few["mtp.blocks.1.mixer.experts.up"].dtype == np.float32


def test_scales_of_inputs_come_with_weights_in_8_bits(mixed, changeable):
    few = values(load(mixed[0]))
    scale = few["blocks.0.mixer.in_proj_zx.weight.input_scale"]
    assert scale.shape == (2, 128)  # one of each output, as with other scales: the weight was cut
    np.testing.assert_array_equal(np.asarray(scale), np.float32(0.02))
    four_bits = {path for path, value in few.items() if value.dtype == ml_dtypes.float4_e2m1fn}
    assert four_bits
    assert not {path.replace(".values", ".input_scale") for path in four_bits} & set(few)
    tensors, write = changeable
    del tensors["backbone.layers.0.mixer.in_proj.input_scale"]  # as of inputs that no calibration has met
    assert "blocks.0.mixer.in_proj_zx.weight.input_scale" not in values(load(write(tensors)))


def test_a_converted_checkpoint_stays_narrow(mixed, tmp_path):
    checkpoints.convert(mixed[0], tmp_path / "orbax", dtype="float32", progress=False)
    assert_equal(values(load(tmp_path / "orbax")), values(load(mixed[0])))


EXPERT, SHARED = "backbone.layers.1.mixer.experts.2.up_proj", "backbone.layers.1.mixer.shared_experts.up_proj"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{EXPERT}.weight_scale_2", None, f"1 quantized weights are not whole: {EXPERT}.weight_scale_2 is missing"),
        (f"{EXPERT}.weight_scale", None, f"{EXPERT}.weight_scale is missing"),
        (f"{SHARED}.weight_scale", None, f"{SHARED}.weight_scale is missing"),
        (f"{SHARED}.weight", None, rf"{SHARED}.weight \[64, 64\]"),
        (f"{EXPERT}.weight_scale_2", np.ones(3, np.float32), r"weight_scale_2 is \[3\], expected one number or \[32\]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 3), ml_dtypes.float8_e4m3fn), r"is \[32, 3\], expected \[32, 4\]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 4), np.float32), r"weight_scale is \[32, 4\], expected \[64, 4\]"),
        (f"{SHARED}.weight_scale", np.ones((64, 2), np.float32), r"is \[64, 2\], expected one number or \[64\]"),
        ("backbone.layers.3.mixer.q_proj.weight_scale", np.ones((), np.float32), "1 unexpected: .*q_proj.weight_scale"),
        (
            "backbone.layers.3.mixer.q_proj.weight",
            np.ones((64, 64), ml_dtypes.float8_e4m3fn),
            "weight_scale is missing",
        ),
    ],
)
def test_a_missing_wrong_or_superfluous_tensor_is_named(changeable, name, value, message):
    tensors, write = changeable
    changed = {other: one for other, one in (tensors | {name: value}).items() if one is not None}
    with pytest.raises(CheckpointError, match=message):
        load(write(changed))


@pytest.mark.parametrize("other", ["wide", "FP8"])
def test_experts_of_different_forms_are_widened(mixed, changeable, other):
    tensors, write = changeable
    weight = np.arange(32 * 64, dtype=np.float32).reshape(32, 64) / 4096
    parts, expected = ({"weight": weight}, weight) if other == "wide" else fp8(weight)
    others = {k: v for k, v in tensors.items() if not k.startswith(EXPERT)}
    few = values(load(write(others | {f"{EXPERT}.{suffix}": part for suffix, part in parts.items()})))
    wide = values(load(mixed[1]))["blocks.1.mixer.experts.up"].copy()
    wide[2] = expected
    np.testing.assert_allclose(few["blocks.1.mixer.experts.up"], wide, rtol=2e-6, atol=1e-7)
    assert few["blocks.1.mixer.experts.down.values"].dtype == ml_dtypes.float4_e2m1fn


def test_scales_of_cached_keys_and_values_may_be_there(changeable, tmp_path_factory):
    tensors, write = changeable
    name = "backbone.layers.3.mixer.k_proj.k_scale"
    unused = dict.fromkeys((name.replace("k_scale", "q_scale"), "x.k_bmm_quantizer._amax"), np.ones(1, np.float32))
    directory = write(tensors | unused | {name: np.asarray([0.5], np.float32)})
    few = values(load(directory))
    target = tmp_path_factory.mktemp("scales") / "orbax"
    checkpoints.convert(directory, target, dtype="float32", progress=False)
    assert_equal(values(load(target)), few)
    assert few["blocks.3.mixer.k_scale"] == 0.5
    # What is not said is 1: of values here, and of the draft layer.
    assert few["blocks.3.mixer.v_scale"] == few["mtp.blocks.0.mixer.k_scale"] == 1
    with pytest.raises(CheckpointError, match=r"k_scale is \[2\], expected \[\]"):
        load(write(tensors | {name: np.ones(2, np.float32)}))


def test_narrow_weights_need_a_description(changeable):
    tensors, write = changeable
    with pytest.raises(CheckpointError, match=r"weight is F8_E4M3, but config.json describes no quantization"):
        load(write(tensors, quantization_config=None))


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"quant_method": "quanto"}, "method 'quanto' is not supported; known are modelopt, compressed"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported; 2, 4 and 8"),
        ({"quant_method": "auto-round", "packing_format": "gguf:q4_0"}, "packing_format 'gguf:q4_0' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "awq version 'gemv' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, "is not the shape of a block"),
        ("int8", "is not an object"),
    ],
)
def test_what_is_not_supported_is_refused(changeable, description, message):
    tensors, write = changeable
    with pytest.raises(CheckpointError, match=message):
        load(write(tensors, quantization_config=description))


def test_modelopt_may_describe_it_in_a_file_of_its_own(changeable):
    tensors, write = changeable
    directory = write(tensors, quantization_config=None)
    (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MIXED_PRECISION"}}')
    assert quantized_weights(values(load(directory)))


def test_packing_is_that_of_the_formats_own_library():
    torch = pytest.importorskip("torch", reason="torch is not installed: needs the parity extra")
    library = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    codes = np.random.default_rng(0).integers(-8, 8, (6, 32)).astype(np.int8)
    words = library.pack_to_int32(torch.from_numpy(codes), 4).numpy()
    np.testing.assert_array_equal(packing.unpack(words, 4, -1).astype(np.int8) - 8, codes)
    np.testing.assert_array_equal(packing.pack((codes + 8).astype(np.uint8), 4), words)
    floats = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).reshape(2, 8)
    packed = library.pack_fp4_to_uint8(torch.from_numpy(floats.astype(np.float32)).to(torch.bfloat16)).numpy()
    np.testing.assert_array_equal(packing.unpack_fp4(packed).view(np.uint8), floats.view(np.uint8))
    np.testing.assert_array_equal(packing.pack_fp4(floats), packed)
