"""Forms of quantized weights that are known by their tensors: what each stands for, by its published definition."""

import json
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.quantized import packing
from checkpoints.tensors.tensor_set import TensorSet
from tests.checkpoints.checks import load, message
from tests.checkpoints.test_quantized import assert_stands_for
from tests.support.models import quantized_checkpoints
from tests.support.models.quantized_checkpoints import awq, config_of, fp8, fp8_blocks, gptq, nvfp4, write_quantized

RNG = np.random.default_rng(0)
NF4 = "weight.quant_state.bitsandbytes__nf4"


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
        words = quantized_checkpoints._words((signed + 2 ** (bits - 1)).astype(np.int64), bits, -1)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": np.asarray(w.shape)}, signed * scale

    return write


def mxfp4(w, *, name="weight"):
    """Pairs of e2m1, and a power of two, as a byte, for each 32 inputs."""
    exponent = RNG.integers(-7, -4, (*w.shape[:-1], w.shape[-1] // 32))
    codes = RNG.integers(0, 16, w.shape, np.uint8)
    stored = {name: codes[..., 0::2] + 16 * codes[..., 1::2], "weight_scale": (exponent + 127).astype(np.uint8)}
    return stored, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.repeat(np.exp2(exponent), 32, -1)


def four_bits(w, *, block=64):
    """bitsandbytes' 4 bits: a table of 16 numbers, and for each 64 of a weight a factor, which is in 8 bits itself."""
    table, codes = RNG.uniform(-1, 1, 16).astype(np.float32), RNG.integers(0, 16, w.size, np.uint8)
    inner, outer = RNG.integers(0, 256, -(-w.size // block), np.uint8), RNG.uniform(-1, 1, 256).astype(np.float32)
    sizes = RNG.uniform(0.01, 0.1, -(-inner.size // 256)).astype(np.float32)
    factor = outer[inner] * np.repeat(sizes, 256)[: inner.size] + np.float32(0.25)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
    state |= {"nested_blocksize": max(block, 256), "nested_offset": 0.25}
    parts = {"weight": (16 * codes[0::2] + codes[1::2])[:, None], "weight.absmax": inner, "weight.quant_map": table}
    parts |= {"weight.nested_absmax": sizes, "weight.nested_quant_map": outer}
    parts[NF4] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts, (table[codes] * np.repeat(factor, min(block, w.size))).reshape(w.shape)


MODELOPT, BNB, COMPRESSED = ({"quant_method": name} for name in ("modelopt", "bitsandbytes", "compressed-tensors"))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
AUTO = {"quant_method": "auto-round", "bits": 4, "sym": True}
FORMS = {
    "GPTQ without zero points": (GPTQ, {r".*_proj": symmetric(gptq)}),
    "AWQ without zero points": ({"quant_method": "awq", "bits": 4}, {r".*_proj": symmetric(awq)}),
    "bits per module without zero points": (
        GPTQ | {"group_size": 64},  # of no module: the model's sizes decide
        {r".*(up|down)_proj": symmetric(gptq, bits=8), r".*_proj": symmetric(gptq)},
    ),
    "AutoRound as AWQ": (AUTO | {"packing_format": "auto_round:auto_awq"}, {r".*_proj": symmetric(awq)}),
    "3 bits": (COMPRESSED, {r".*_proj": packed(3)}),
    "2 bits": (COMPRESSED, {r".*_proj": packed(2)}),
    "MXFP4": (MODELOPT, {r".*_proj": mxfp4}),
    "bitsandbytes NF4, one block": (BNB, {r".*up_proj": partial(four_bits, block=1 << 62), r".*_proj": fp8}),
    "GPTQ's description of AWQ's tensors": (GPTQ, {r".*(up|down)_proj": awq, r".*_proj": gptq}),
    "no method": ({"config_groups": {}}, {r".*_proj": packed(4)}),
    "ModelOpt's groups": (MODELOPT | {"config_groups": {}}, {r".*_proj": fp8}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_known_by_their_tensors(tmp_path, form):
    description, formats = FORMS[form]
    assert_stands_for(*write_quantized(tmp_path, config_of("falcon"), formats, description))


@pytest.mark.parametrize(
    ("parts_of", "said"),
    [
        (
            lambda w: {"weight": w.astype(np.int8), "SCB": w[:, 0], "weight_format": np.uint8(2)},
            "up_proj.weight_format is 2, expected 0 (rows)",
        ),
        (
            lambda w: four_bits(w)[0] | {NF4: np.frombuffer(b'{"shape": [Infinity], "blocksize": 64}', np.uint8)},
            f"up_proj.{NF4} does not describe a weight (cannot convert",
        ),
    ],
)
def test_bitsandbytes_tensors_that_are_not_usable_are_named(tmp_path, parts_of, said):
    narrow, _ = write_quantized(tmp_path, config_of("falcon"), {r".*up_proj": lambda w: (parts_of(w), w)}, BNB)
    assert said in message(load, narrow)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (fp8_blocks, {"weight_scale_inv": "_scale_inv"}),
        (lambda w: fp8(w, per="channel"), {"weight_scale": "_scale", "input_scale": "_input_scale"}),
        (partial(mxfp4, name="blocks"), {"blocks": "_blocks", "weight_scale": "_scales"}),
        (nvfp4, {each: f"_{each}" for each in ("weight_scale", "weight_scale_2", "input_scale")}),
    ],
    ids=["FP8 blocks", "FP8 channels", "MXFP4", "NVFP4"],
)
def test_experts_may_be_one_tensor(tmp_path, kind, names):
    """As transformers 5 writes them: `experts.gate_up_proj`, and scales whose names begin so."""
    description = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    formats = {r".*block_sparse_moe\.(in|out)put_linear": kind}
    narrow, wide = write_quantized(tmp_path, config_of("granite"), formats, description)
    tensors, stored = {}, TensorSet(narrow)
    for name in stored.names:
        value, (module, _, suffix) = np.array(stored.view(name)), name.rpartition(".")
        if "block_sparse_moe.input_linear" in module or "block_sparse_moe.output_linear" in module:
            fused = module.replace("input_linear", "experts.gate_up_proj").replace("output_linear", "experts.down_proj")
            name = fused + names.get(suffix, "")
            value = value.reshape(*value.shape[:2], -1, 16) if suffix == "blocks" else value
        tensors[name] = value
    del stored
    save_file(tensors, narrow / "model.safetensors")
    assert_stands_for(narrow, wide)
