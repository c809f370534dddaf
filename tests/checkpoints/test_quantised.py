"""Quantised checkpoints: each format says what the weights say that it stands for by its published definition."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints import CheckpointError, load_model
from checkpoints.quantised import packing
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.model import parameters
from mamba_jax.modules.quantised import quantised_weights
from tests.support.models.golden_case import full_log_probs
from tests.support.models.quantised_checkpoints import (
    CONFIGS,
    METHODS,
    _words,
    awq,
    config_of,
    fp8,
    fp8_blocks,
    gptq,
    nvfp4,
    write_mixed,
    write_quantised,
)

TOLERANCE = 2e-4


def load(directory, **flags):
    return load_model(directory, dtype="float32", progress=False, **flags)


def values(model):
    return {path: leaf[...] for path, leaf in parameters(model).items()}


def written(tmp_path, model, method):
    description, formats = METHODS[method]
    if model == "granite" and ("GPTQ" in method or method == "AWQ" or "INT4" in method):
        # Its experts are three-dimensional tensors, which these formats do not have.
        formats = {
            pattern.replace("(in|out)put_linear", "shared_mlp.(in|out)put_linear"): f for pattern, f in formats.items()
        }
    return write_quantised(tmp_path, config_of(model), formats, description)


@pytest.mark.smoke("method")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", CONFIGS)
def test_weights_are_those_that_the_format_stands_for(tmp_path, model, method):
    narrow, wide = (load(directory) for directory in written(tmp_path, model, method))
    few, expected = values(narrow), values(wide)
    quantised = quantised_weights(few)
    assert bool(quantised) == (method != "GPTQ act-order")
    for path, value in expected.items():
        got = quantised[path].dequantise() if path in quantised else few[path]
        assert got.shape == value.shape
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-7, err_msg=path)


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
    stored, again = values(load(mixed[0])), values(load(tmp_path / "orbax"))
    assert {path: value.dtype for path, value in again.items()} == {path: v.dtype for path, v in stored.items()}
    for path, value in stored.items():
        np.testing.assert_array_equal(np.asarray(again[path]), np.asarray(value), err_msg=path)


EXPERT, SHARED = "backbone.layers.1.mixer.experts.2.up_proj", "backbone.layers.1.mixer.shared_experts.up_proj"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{EXPERT}.weight_scale_2", f"1 quantized weights are not whole: {EXPERT}.weight_scale_2 is missing"),
        (f"{EXPERT}.weight_scale", f"{EXPERT}.weight_scale is missing"),
        (f"{SHARED}.weight_scale", f"{SHARED}.weight_scale is missing"),
        (f"{SHARED}.weight", rf"{SHARED}.weight \[64, 64\]"),
    ],
)
def test_a_missing_tensor_is_named(changeable, name, message):
    tensors, write = changeable
    del tensors[name]
    with pytest.raises(CheckpointError, match=message):
        load(write(tensors))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{EXPERT}.weight_scale_2", np.ones(3, np.float32), r"weight_scale_2 is \[3\], expected one number or \[32\]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 3), ml_dtypes.float8_e4m3fn), r"is \[32, 3\], expected \[32, 4\]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 4), np.float32), "weight_scale is F32, expected F8_E4M3"),
        (f"{SHARED}.weight_scale", np.ones((64, 2), np.float32), r"is \[64, 2\], expected one number or \[64\]"),
        ("backbone.layers.3.mixer.q_proj.weight_scale", np.ones((), np.float32), "1 unexpected: .*q_proj.weight_scale"),
        (
            "backbone.layers.3.mixer.q_proj.weight",
            np.ones((64, 64), ml_dtypes.float8_e4m3fn),
            "weight_scale is missing",
        ),
    ],
)
def test_a_wrong_or_superfluous_scale_is_named(changeable, name, value, message):
    tensors, write = changeable
    with pytest.raises(CheckpointError, match=message):
        load(write(tensors | {name: value}))


@pytest.mark.parametrize("other", ["wide", "FP8"])
def test_experts_of_different_forms_are_widened(mixed, changeable, other):
    tensors, write = changeable
    weight = np.arange(32 * 64, dtype=np.float32).reshape(32, 64) / 4096
    parts, expected = ({"weight": weight}, weight) if other == "wide" else fp8(weight)
    others = {k: v for k, v in tensors.items() if not k.startswith(EXPERT)}
    few = values(load(write(others | {f"{EXPERT}.{suffix}": part for suffix, part in parts.items()})))
    wide = values(load(mixed[1]))["blocks.1.mixer.experts.up"]
    np.testing.assert_allclose(few["blocks.1.mixer.experts.up"], wide.at[2].set(expected), rtol=2e-6, atol=1e-7)
    assert few["blocks.1.mixer.experts.down.values"].dtype == ml_dtypes.float4_e2m1fn


def symmetric(kind, **options):
    """A format without zero points, which are the middle then."""

    def write(w):
        parts, _ = kind(w, **options)
        parts["qzeros"][...] = 0x77777777 if kind is gptq else -0x77777778
        bits = options.get("bits", 4)
        if bits == 8:
            parts["qzeros"][...] = 0x7F7F7F7F
        scale = parts["scales"].T.astype(np.float32)
        codes = packing.unpack_awq(parts["qweight"]) if kind is awq else packing.unpack(parts["qweight"], bits, 0)
        signed = codes.T.astype(np.float32) - 2 ** (bits - 1)
        wide = (signed.reshape(*scale.shape, -1) * scale[..., None]).reshape(w.shape)
        return {suffix: part for suffix, part in parts.items() if suffix not in ("qzeros", "g_idx")}, wide

    return write


def packed(bits):
    """compressed-tensors' integers of few bits: a word holds as many as fit whole."""

    def write(w):
        scale = (np.abs(w).max(-1, keepdims=True) / (2 ** (bits - 1) - 0.5)).astype(np.float32)
        signed = np.clip(np.rint(w / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        words = _words((signed + 2 ** (bits - 1)).astype(np.int64), bits, -1)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": np.asarray(w.shape)}, signed * scale

    return write


GPTQ, AUTO = (
    {"quant_method": "gptq", "bits": 4, "group_size": 16},
    {"quant_method": "auto-round", "bits": 4, "sym": True},
)
FORMS = {
    "GPTQ without zero points": (GPTQ, {r".*_proj": symmetric(gptq)}),
    "AWQ without zero points": ({"quant_method": "awq", "bits": 4}, {r".*_proj": symmetric(awq)}),
    "bits per module": (GPTQ, {r".*(up|down)_proj": lambda w: gptq(w, bits=8), r".*_proj": gptq}),
    "AutoRound as GPTQ": (AUTO | {"packing_format": "auto_round:auto_gptq"}, {r".*_proj": symmetric(gptq)}),
    "AutoRound as AWQ": (AUTO | {"packing_format": "auto_round:auto_awq"}, {r".*_proj": symmetric(awq)}),
    "AutoRound, not symmetric": (AUTO | {"packing_format": "auto_round:auto_gptq", "sym": False}, {r".*_proj": gptq}),
    "3 bits": ({"quant_method": "compressed-tensors"}, {r".*_proj": packed(3)}),
    "2 bits": ({"quant_method": "compressed-tensors"}, {r".*_proj": packed(2)}),
    "ModelOpt's groups": ({"quant_method": "modelopt", "config_groups": {}}, {r".*_proj": fp8}),
}


def assert_stands_for(narrow, wide):
    few, expected = values(load(narrow)), values(load(wide))
    quantised = quantised_weights(few)
    assert quantised
    for path, value in expected.items():
        got = quantised[path].dequantise() if path in quantised else few[path]
        np.testing.assert_allclose(got, value, rtol=2e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_known_by_their_tensors(tmp_path, form):
    description, formats = FORMS[form]
    assert_stands_for(*write_quantised(tmp_path, config_of("falcon"), formats, description))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (fp8_blocks, {"weight_scale_inv": "_scale_inv"}),
        (lambda w: fp8(w, per="channel"), {"weight_scale": "_scale", "input_scale": "_input_scale"}),
        (nvfp4, {each: f"_{each}" for each in ("weight_scale", "weight_scale_2", "input_scale")}),
    ],
    ids=["FP8 blocks", "FP8 channels", "NVFP4"],
)
def test_experts_may_be_one_tensor(tmp_path, kind, names):
    """As transformers 5 writes them: `experts.gate_up_proj`, and scales whose names begin so."""
    description = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    formats = {r".*block_sparse_moe\.(in|out)put_linear": kind}
    narrow, wide = write_quantised(tmp_path, config_of("granite"), formats, description)
    tensors = {}
    stored = TensorSet(narrow)
    for name in stored.names:
        value, (module, _, suffix) = np.array(stored.view(name)), name.rpartition(".")
        if "block_sparse_moe.input_linear" in module or "block_sparse_moe.output_linear" in module:
            fused = module.replace("input_linear", "experts.gate_up_proj").replace("output_linear", "experts.down_proj")
            name = fused if suffix == "weight" else f"{fused}{names[suffix]}"
        tensors[name] = value
    del stored
    save_file(tensors, narrow / "model.safetensors")
    assert_stands_for(narrow, wide)


def test_scales_of_cached_keys_and_values_may_be_there(changeable):
    tensors, write = changeable
    name = "backbone.layers.3.mixer.k_proj.k_scale"
    few = values(load(write(tensors | {name: np.asarray([0.5], np.float32)})))
    assert few["blocks.3.mixer.k_scale"] == 0.5
    # What is not said is 1: of values here, and of the draft layer.
    assert few["blocks.3.mixer.v_scale"] == few["mtp.blocks.0.mixer.k_scale"] == 1
    with pytest.raises(CheckpointError, match=r"k_scale is \[2\], expected \[\]"):
        load(write(tensors | {name: np.ones(2, np.float32)}))


def test_scales_of_cached_keys_and_values_come_back_from_orbax(changeable, tmp_path_factory):
    tensors, write = changeable
    directory = write(tensors | {"backbone.layers.3.mixer.v_scale": np.asarray(0.25, np.float32)})
    target = tmp_path_factory.mktemp("scales") / "orbax"
    checkpoints.convert(directory, target, dtype="float32", progress=False)
    assert values(load(target))["blocks.3.mixer.v_scale"] == 0.25


def test_narrow_weights_need_a_description(changeable):
    tensors, write = changeable
    with pytest.raises(CheckpointError, match=r"weight is F8_E4M3, but config.json describes no quantization"):
        load(write(tensors, quantization_config=None))


def test_the_other_order_of_nibbles_shows(mixed, monkeypatch):
    expected = full_log_probs(load(mixed[1]), [[5, 6, 7]])[0]

    def swapped(packed):
        values = packing.unpack_fp4(packed)
        return np.ascontiguousarray(values.reshape(*values.shape[:-1], -1, 2)[..., ::-1]).reshape(values.shape)

    got = full_log_probs(load(mixed[0]), [[5, 6, 7]])[0]
    assert np.abs(got - expected).max() <= TOLERANCE
    monkeypatch.setattr("checkpoints.quantised.floats.unpack_fp4", swapped)
    assert np.abs(full_log_probs(load(mixed[0]), [[5, 6, 7]])[0] - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "method 'bitsandbytes' is not supported; known are modelopt, compressed"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT4_AWQ"}}},
            "quant_algo 'INT4_AWQ' is not supported",
        ),
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
    assert quantised_weights(values(load(directory)))


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
