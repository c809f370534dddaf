"""Quantized checkpoints: each format says what the weights say that it stands for; and wide ones that are quantized."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
from checkpoints import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.placing import nbytes
from checkpoints.quantized.description import Quantization, read_quantization
from checkpoints.quantized.rounding import QUANTIZATIONS, Rounding
from checkpoints.random import write_random
from checkpoints.tensors.tensor_set import TensorSet
from kernels_pallas.quantized import Quantized
from mamba_jax.modules.quantized import quantized_weights
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.cli.main import run
from serving.config import ConfigError, EngineConfig
from tests.checkpoints.checks import assert_equal, load, message, values
from tests.support.models.quantized_checkpoints import CONFIGS, METHODS, config_of, fp8, write_mixed, write_quantized

# All of a model at once: one for each shape would be many programs.
dequantized = jax.jit(partial(jax.tree.map, Quantized.dequantize, is_leaf=lambda each: isinstance(each, Quantized)))


def assert_stands_for(quantized, wide, *, narrow=True):
    """A quantized checkpoint has the weights of the wide one, and keeps some of them narrow."""
    few, expected = values(load(quantized)), values(load(wide))
    found = quantized_weights(few)
    assert bool(found) == narrow
    few |= dequantized(found)
    for path, value in expected.items():
        assert few[path].shape == value.shape
        np.testing.assert_allclose(few[path], value, rtol=2e-6, atol=1e-7, err_msg=path)


@pytest.mark.smoke("method")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", CONFIGS)
def test_weights_are_those_that_the_format_stands_for(tmp_path, model, method):
    description, formats = METHODS[method]
    if model == "granite" and ("GPTQ" in method or method == "AWQ" or "INT4" in method):
        # Its experts are three-dimensional tensors, which these formats do not have.
        formats = {p.replace("(in|out)put_linear", "shared_mlp.(in|out)put_linear"): f for p, f in formats.items()}
    pair = write_quantized(tmp_path, config_of(model), formats, description)
    assert_stands_for(*pair, narrow=method != "GPTQ act-order")


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


EXPERT, SHARED = "backbone.layers.1.mixer.experts.2.up_proj", "backbone.layers.1.mixer.shared_experts.up_proj"
QUERIES = "backbone.layers.3.mixer.q_proj"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (f"{EXPERT}.weight_scale_2", None, f"1 quantized weights are not whole: {EXPERT}.weight_scale_2 is missing"),
        (f"{EXPERT}.weight_scale", None, f"{EXPERT}.weight_scale is missing"),
        (f"{SHARED}.weight_scale", None, f"{SHARED}.weight_scale is missing"),
        (f"{SHARED}.weight", None, f"{SHARED}.weight [64, 64]"),
        (f"{EXPERT}.weight_scale_2", np.ones(3, np.float32), "weight_scale_2 is [3], expected one number or [32]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 3), ml_dtypes.float8_e4m3fn), "is [32, 3], expected [32, 4]"),
        (f"{EXPERT}.weight_scale", np.ones((32, 4), np.float32), "weight_scale is [32, 4], expected [64, 4]"),
        (f"{SHARED}.weight_scale", np.ones((64, 2), np.float32), "is [64, 2], expected one number or [64]"),
        (f"{QUERIES}.weight_scale", np.ones((), np.float32), f"1 unexpected: {QUERIES}.weight_scale"),
        (f"{QUERIES}.weight", np.ones((64, 64), ml_dtypes.float8_e4m3fn), "weight_scale is missing"),
    ],
)
def test_a_missing_wrong_or_superfluous_tensor_is_named(changeable, name, value, said):
    tensors, write = changeable
    changed = {other: one for other, one in (tensors | {name: value}).items() if one is not None}
    assert said in message(load, write(changed))


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
    assert "k_scale is [2], expected []" in message(load, write(tensors | {name: np.ones(2, np.float32)}))


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"quant_method": "quanto"}, "method 'quanto' is not supported; known are modelopt, compressed"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported; 2, 4 and 8"),
        ({"quant_method": "auto-round", "packing_format": "gguf:q4_0"}, "packing_format 'gguf:q4_0' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "awq version 'gemv' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, "is not the shape of a block"),
        ("int8", "is not an object"),
        (None, "weight is F8_E4M3, but config.json describes no quantization"),
    ],
)
def test_what_is_not_supported_is_refused(changeable, description, said):
    tensors, write = changeable
    assert said in message(load, write(tensors, quantization_config=description))


COMPRESSED = Quantization("compressed-tensors")


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "MIXED_PRECISION"}}, Quantization("modelopt")),
        ("quantize_config.json", {"bits": 8, "desc_act": False}, Quantization("gptq", bits=8, zero_offset=1)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64}, Quantization("awq", group_size=64)),
        ("config.json", {"compression_config": {"config_groups": {}}}, COMPRESSED),
        ("config.json", {"quantization_config": {"quantization_status": "compressed"}}, COMPRESSED),
        ("config.json", {"quantization_config": {"bits": 4, "sym": True}}, Quantization("gptq", zero_offset=1)),
        ("config.json", {"quantization_config": {"weight_block_size": [8, 8]}}, Quantization("fp8", block=(8, 8))),
    ],
)
def test_older_descriptions_are_read(tmp_path, file, content, expected):
    (tmp_path / file).write_text(json.dumps(content))
    fields = content if file == "config.json" else {"quantization_config": None}
    assert read_quantization(tmp_path, fields) == expected


# The largest error, in units of the largest value of the channel or group: half a step of the widest interval.
WORST = {"int8": 0.5 / 127, "fp8": 2.0**-4, "int4": 0.52 / 7, "nvfp4": 0.18}


def forms(arrays):
    return {name: (each.shape, each.dtype) for name, each in arrays.items()}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("wide"), config_of("latent"), seed=4)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_rounds_to_the_nearest(kind):
    weight = np.random.default_rng(0).normal(size=(3, 10, 64)).astype(np.float32)
    weight[0, 0] = 0
    rounding = Rounding(kind, {"int4": 32, "nvfp4": 16}.get(kind, 0))
    parts = rounding.round(weight)
    assert forms(parts) == forms(rounding.parts(weight.shape))
    got = np.asarray(Quantized(**{name: jnp.asarray(part) for name, part in parts.items()}).dequantize())
    split = weight.reshape(3, 10, -1, rounding.group or 64)
    error = np.abs(got.reshape(split.shape) - split).max(-1)
    assert (error <= WORST[kind] * np.abs(split).max(-1)).all()
    assert error.max() > WORST[kind] * np.abs(split).max() / 8
    assert not got[0, 0].any()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_products_are_quantized_and_nothing_else(wide, kind):
    few, all_of = values(load(wide, quantization=kind)), values(load(wide))
    found = quantized_weights(few)
    left = {path for path in all_of if path not in found and all_of[path].ndim > 1}
    names = {path.split(".", 2)[-1] for path in left if path.startswith("blocks")}
    assert names == {f"mixer.{name}.weight" for name in ("conv_x", "conv_bc", "router")}
    assert {"embed.weight", "lm_head.weight"} <= left
    for path, weight in dequantized(found).items():
        error = np.abs(np.asarray(weight) - np.asarray(all_of[path])).max()
        assert error <= WORST[kind] * np.abs(all_of[path]).max()
    assert forms(few) == forms(Checkpoint(wide, dtype="float32", quantization=kind).shapes())


def test_what_is_excluded_stays_wide(wide):
    model = load(wide, quantization="int8", quantization_exclude=["*.layers.0.*", "experts", "q_proj"])
    found = set(quantized_weights(values(model)))
    assert not any(path.startswith("blocks.0.") or ".experts." in path or "q_proj" in path for path in found)
    assert "blocks.2.mixer.out_proj.weight" in found
    with pytest.raises(CheckpointError, match="no weight of this model is called 'o_prj'"):
        load(wide, quantization="int8", quantization_exclude=["o_prj"])
    assert "no effect without quantization" in message(load, wide, quantization_exclude=["o_proj"])
    assert "allowed are int8, fp8, int4, nvfp4" in message(load, wide, quantization="int3")


def test_convert_writes_what_loading_makes(wide, tmp_path):
    checkpoints.convert(wide, tmp_path / "orbax", dtype="float32", quantization="int4", progress=False)
    got = values(load(tmp_path / "orbax"))
    assert_equal(got, values(load(wide, quantization="int4")))
    assert forms(got) == forms(Checkpoint(tmp_path / "orbax", dtype="float32").shapes())
    assert "convert --quantization" in message(load, tmp_path / "orbax", quantization="int8")
    assert "no effect without quantization" in message(load, tmp_path / "orbax", quantization_exclude=["o_proj"])


@pytest.mark.smoke
@pytest.mark.parametrize("kind", sorted(QUANTIZATIONS, reverse=True))
@pytest.mark.parametrize("model", ["latent", "granite", "falcon"])
def test_hugging_face_form_says_what_loading_makes(model, kind, tmp_path):
    source = write_random(tmp_path / "source", config_of(model), seed=4)
    # Granite's experts are tensors of three dimensions, which packed integers are not.
    exclude = ["block_sparse_moe"] if (model, kind) == ("granite", "int4") else []
    flags = {"quantization": kind, "quantization_exclude": exclude}
    checkpoints.convert(source, tmp_path / "narrow", form="hugging-face", **flags)
    description = json.loads((tmp_path / "narrow/config.json").read_text())["quantization_config"]
    assert description["quant_method"] == "compressed-tensors"
    assert "lm_head" in description["ignore"] or "tie" in str(config_of(model))
    expected, got = values(load(source, **flags)), values(load(tmp_path / "narrow"))
    stands_for = [dequantized(quantized_weights(v)) for v in (expected, got)]
    assert stands_for[0].keys() == stands_for[1].keys() != set()
    for path, weight in stands_for[0].items():
        np.testing.assert_array_equal(stands_for[1][path], weight, err_msg=path)
    for path in expected.keys() & got.keys():
        np.testing.assert_array_equal(np.asarray(expected[path]), np.asarray(got[path]), err_msg=path)


def test_what_hugging_face_form_cannot_be_written_from(wide, tmp_path):
    convert = partial(checkpoints.convert, form="hugging-face", quantization="int8")
    odd, target = write_random(tmp_path / "odd", config_of("granite"), seed=4), tmp_path / "x"
    assert "whole words" in message(convert, odd, target, quantization="int4")
    assert "exclude all" in message(convert, wide, target, quantization_exclude=["in_proj_dt"])
    assert "is not empty" in message(convert, wide, odd)
    narrow, _ = write_mixed(tmp_path)
    assert "is quantized already" in message(convert, narrow, target)


def test_dummy_weights_can_be_quantized(wide):
    few = values(load(wide, load_format="dummy", quantization="nvfp4"))
    dense = values(load(wide, load_format="dummy"))
    for path, weight in dequantized(quantized_weights(few)).items():
        assert np.abs(weight - dense[path]).max() <= WORST["nvfp4"] * np.abs(dense[path]).max()


def test_quantized_checkpoints_are_described_and_not_quantized_again(tmp_path, capsys):
    narrow, wide = write_mixed(tmp_path)
    text = Checkpoint(narrow).quantized_as()
    assert run(["inspect", "--model", str(narrow)]) == 0
    assert text[:30] in " ".join(capsys.readouterr().out.split())  # the table wraps where the terminal ends
    assert "NVFP4, groups of 16: mixer.experts.*.down_proj (16), mixer.experts.*.up_proj (16)" in text
    assert "FP8, a scale per tensor: mixer.in_proj (2), mixer.out_proj (2)" in text
    assert Checkpoint(wide).quantized_as() == ""
    checkpoints.convert(narrow, tmp_path / "orbax", progress=False)
    assert "float8_e4m3fn: mixer.in_proj_bc (2), mixer.in_proj_dt (2)" in Checkpoint(tmp_path / "orbax").quantized_as()
    assert "is quantized already" in message(load, narrow, quantization="int8")
    loaded, checkpoint = values(load(narrow)), Checkpoint(narrow, dtype="float32")
    assert forms(loaded) == forms(checkpoint.shapes())
    assert sum(map(nbytes, loaded.values())) == checkpoint.nbytes()


def plan(**flags):
    sizes = {"max_num_seqs": 16, "tensor_parallel_size": 4}
    config = EngineConfig.create(model="nemotron-3-nano-30b-a3b", **sizes, **flags)
    return make_plan(config, target("v5e-4"), compile=False)


@pytest.mark.full
def test_plans_count_narrow_weights():
    wide, int8, nvfp4 = (plan(quantization=kind) for kind in (None, "int8", "nvfp4"))
    assert (wide.fits, int8.fits, nvfp4.fits) == (False, True, True)
    assert 0.5 < int8.weights / wide.weights < 0.55
    assert 0.28 < nvfp4.weights / wide.weights < 0.34
    with pytest.raises(ConfigError, match="no weight of this model is called 'x'"):
        plan(quantization="int8", quantization_exclude="x")
