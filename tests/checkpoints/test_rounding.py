"""Wide checkpoints quantized while they are read: nearest values, the weights meant, and shapes known beforehand."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.placing import nbytes
from checkpoints.quantized.rounding import QUANTIZATIONS, Rounding
from checkpoints.random import write_random
from kernels_pallas.quantized import Quantized
from mamba_jax.modules.quantized import quantized_weights
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.cli.main import run
from serving.config import ConfigError, EngineConfig
from tests.checkpoints.checks import assert_equal, load, values
from tests.support.models.quantized_checkpoints import config_of, write_mixed

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


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_products_are_quantized_and_nothing_else(wide, kind):
    model = load(wide, quantization=kind)
    few, all_of = values(model), values(load(wide))
    found = quantized_weights(few)
    left = {path for path in all_of if path not in found and all_of[path].ndim > 1}
    assert {path.split(".", 2)[-1] for path in left if path.startswith("blocks")} == {
        "mixer.conv_x.weight",
        "mixer.conv_bc.weight",
        "mixer.router.weight",
    }
    assert {"embed.weight", "lm_head.weight"} <= left
    for path, weight in found.items():
        error = np.abs(np.asarray(weight.dequantize()) - np.asarray(all_of[path])).max()
        assert error <= WORST[kind] * np.abs(all_of[path]).max()
    assert forms(few) == forms(Checkpoint(wide, dtype="float32", quantization=kind).shapes())


def test_the_bytes_of_quantized_weights_are_known_before_they_are_read(wide):
    expected = sum(value.nbytes for value in values(load(wide, quantization="int8")).values())
    assert Checkpoint(wide, dtype="float32", quantization="int8").nbytes() == expected
    assert Checkpoint(wide, dtype="float32").nbytes() > 2 * expected


def test_what_is_excluded_stays_wide(wide):
    model = load(wide, quantization="int8", quantization_exclude=["*.layers.0.*", "experts", "q_proj"])
    found = set(quantized_weights(values(model)))
    assert not any(path.startswith("blocks.0.") or ".experts." in path or "q_proj" in path for path in found)
    assert "blocks.2.mixer.out_proj.weight" in found
    with pytest.raises(CheckpointError, match="no weight of this model is called 'o_prj'"):
        load(wide, quantization="int8", quantization_exclude=["o_prj"])
    with pytest.raises(CheckpointError, match="no effect without quantization"):
        load(wide, quantization_exclude=["o_proj"])
    with pytest.raises(CheckpointError, match="allowed are int8, fp8, int4, nvfp4"):
        load(wide, quantization="int3")


def test_convert_writes_what_loading_makes(wide, tmp_path):
    checkpoints.convert(wide, tmp_path / "orbax", dtype="float32", quantization="int4", progress=False)
    got = values(load(tmp_path / "orbax"))
    assert_equal(got, values(load(wide, quantization="int4")))
    assert forms(got) == forms(Checkpoint(tmp_path / "orbax", dtype="float32").shapes())
    with pytest.raises(CheckpointError, match="convert --quantization"):
        load(tmp_path / "orbax", quantization="int8")


@pytest.mark.parametrize("kind", QUANTIZATIONS)
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
    stands_for = [{path: np.asarray(weight.dequantize()) for path, weight in quantized_weights(v).items()}
                  for v in (expected, got)]  # fmt: skip
    assert stands_for[0].keys() == stands_for[1].keys() != set()
    for path, weight in stands_for[0].items():
        np.testing.assert_array_equal(stands_for[1][path], weight, err_msg=path)
    for path in expected.keys() & got.keys():
        np.testing.assert_array_equal(np.asarray(expected[path]), np.asarray(got[path]), err_msg=path)


def test_what_hugging_face_form_cannot_be_written_from(wide, tmp_path):
    def message(source, target="x", **flags):
        with pytest.raises(CheckpointError) as error:
            checkpoints.convert(source, tmp_path / target, form="hugging-face", **flags)
        return str(error.value)

    assert "whole words" in message(
        write_random(tmp_path / "granite", config_of("granite"), seed=4), quantization="int4"
    )
    assert "exclude all" in message(wide, quantization="int8", quantization_exclude=["in_proj_dt"])
    assert "is not empty" in message(wide, "granite", quantization="int8")
    narrow, _ = write_mixed(tmp_path)
    assert "is quantized already" in message(narrow, quantization="int8")


def test_dummy_weights_can_be_quantized(wide):
    few = values(load(wide, load_format="dummy", quantization="nvfp4"))
    dense = values(load(wide, load_format="dummy"))
    for path, weight in quantized_weights(few).items():
        assert np.abs(weight.dequantize() - dense[path]).max() <= WORST["nvfp4"] * np.abs(dense[path]).max()


def test_quantized_checkpoints_are_described_and_not_quantized_again(tmp_path):
    narrow, wide = write_mixed(tmp_path)
    text = Checkpoint(narrow).quantized_as()
    assert "NVFP4, groups of 16: mixer.experts.*.down_proj (16), mixer.experts.*.up_proj (16)" in text
    assert "FP8, a scale per tensor: mixer.in_proj (2), mixer.out_proj (2)" in text
    assert Checkpoint(wide).quantized_as() == ""
    checkpoints.convert(narrow, tmp_path / "orbax", progress=False)
    assert "float8_e4m3fn: mixer.in_proj_bc (2), mixer.in_proj_dt (2)" in Checkpoint(tmp_path / "orbax").quantized_as()
    with pytest.raises(CheckpointError, match="is quantized already"):
        load(narrow, quantization="int8")
    loaded, checkpoint = values(load(narrow)), Checkpoint(narrow, dtype="float32")
    assert forms(loaded) == forms(checkpoint.shapes())
    assert sum(map(nbytes, loaded.values())) == checkpoint.nbytes()


def test_inspect_prints_what_is_quantized_and_how(tmp_path, capsys):
    assert run(["inspect", "--model", str(write_mixed(tmp_path)[0])]) == 0
    said = " ".join(capsys.readouterr().out.split())  # the table wraps where the terminal ends
    assert "quantized weights" in said
    assert "NVFP4, groups of 16: mixer.experts.*.down_proj (16)" in said
    assert "FP8, a scale per tensor: mixer.in_proj (2)" in said


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
