"""Tiny random checkpoints with quantized weights, as their makers write them, and the wide checkpoints they stand for.

Written from the formats' published definitions, element by element where bits are packed; nothing of the readers is
used.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints.random import random_tensors

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
E4M3, E2M1, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.bfloat16
F32 = np.float32
SEED = 3
_numbers = cache(lambda config: random_tensors(json.loads(config), SEED))
Tensors = dict[str, np.ndarray]
StepHidden = tuple[Tensors, np.ndarray]
"""A module's tensors by suffix, and the weight [*lead, out, in] that they stand for."""

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 256}
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}
_NEMOTRON = {**_MAMBA, **_HEADS, **_EXPERTS, "head_dim": 16}
_OTHER = _HEADS | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32}
_GRANITE = {"intermediate_size": 32, "shared_intermediate_size": 64}
_FALCON = {"head_dim": 16, "mamba_d_ssm": 128, "intermediate_size": 96, "num_hidden_layers": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("nemotronh-moe", {**_NEMOTRON, "n_group": 2, "topk_group": 1}),
    "latent": ("nemotronh-latent", {**_NEMOTRON, "moe_latent_size": 32, "num_experts_per_tok": 3}),
    "granite": ("granite-nope", {**_OTHER, **_GRANITE}),
    "falcon": ("falconh1", {**_OTHER, **_FALCON}),
}


def config_of(name: str) -> dict[str, Any]:
    """One of CONFIGS as config.json has it."""
    golden, changes = CONFIGS[name]
    return json.loads((GOLDEN / golden / "config.json").read_text()) | changes


def _groups(w: np.ndarray, size: int) -> np.ndarray:
    return w.reshape(*w.shape[:-1], -1, size)


def fp8(w: np.ndarray, *, per: str = "tensor", activations: bool = True) -> StepHidden:
    """e4m3 with a factor for the tensor or for each output."""
    axes = (-1,) if per == "channel" else tuple(range(w.ndim))
    scale = (np.abs(w).max(axes, keepdims=True) / 448).astype(F32)
    values = (w / scale).astype(E4M3)
    stored = {"weight": values, "weight_scale": scale if per == "channel" else scale.reshape(())}
    if activations:
        stored["input_scale"] = np.asarray(0.02, F32)
    return stored, values.astype(F32) * scale


def fp8_blocks(w: np.ndarray, *, block: tuple[int, int] = (48, 48), name: str = "weight_scale_inv") -> StepHidden:
    """e4m3 with a factor for each block; those at the edges are smaller."""
    rows, columns = block
    scale = np.empty((*w.shape[:-2], -(-w.shape[-2] // rows), -(-w.shape[-1] // columns)), F32)
    values, wide = np.empty(w.shape, E4M3), np.empty(w.shape, F32)
    for r in range(scale.shape[-2]):
        for c in range(scale.shape[-1]):
            cut = (..., slice(r * rows, (r + 1) * rows), slice(c * columns, (c + 1) * columns))
            one = np.abs(w[cut]).max((-2, -1), keepdims=True) / F32(448)
            scale[..., r, c] = one[..., 0, 0]
            values[cut] = (w[cut] / one).astype(E4M3)
            wide[cut] = values[cut].astype(F32) * one
    return {"weight": values, name: scale}, wide


def mxfp8(w: np.ndarray) -> StepHidden:
    """e4m3 with a power of two, as a byte, for each 32 inputs."""
    grouped = _groups(w, 32)
    exponent = np.floor(np.log2(np.abs(grouped).max(-1))) - 8
    factor = np.exp2(exponent)[..., None]
    values = np.clip(grouped / factor, -448, 448).astype(E4M3)
    stored = {"weight": values.reshape(w.shape), "weight_scale": (exponent + 127).astype(np.uint8)}
    return stored, (values.astype(F32) * factor).reshape(w.shape).astype(F32)


def nvfp4(w: np.ndarray, *, compressed: bool = False, activations: bool = True) -> StepHidden:
    """Pairs of e2m1, the first in the lower four bits; e4m3 for each 16 inputs; one float32 for the tensor."""
    grouped = _groups(w, 16)
    whole = F32(np.abs(w).max() / (6 * 448))
    if compressed:
        whole = 1 / F32(1 / whole)
    scale = (np.abs(grouped).max(-1) / 6 / whole).astype(E4M3)
    factor = np.maximum(scale.astype(F32)[..., None] * whole, 1e-30)
    values = (grouped / factor).astype(E2M1).reshape(w.shape)
    codes = values.view(np.uint8)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    wide = (_groups(values.astype(F32), 16) * scale.astype(F32)[..., None] * whole).reshape(w.shape)
    if compressed:
        stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": np.asarray([1 / whole], F32)}
        return stored, wide
    stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": np.asarray(whole, F32)}
    return stored | ({"input_scale": np.asarray(0.01, F32)} if activations else {}), wide


def int8(w: np.ndarray) -> StepHidden:
    """int8 with a factor for each output."""
    scale = (np.abs(w).max(-1, keepdims=True) / 127).astype(BF16)
    values = np.clip(np.rint(w / scale.astype(F32)), -128, 127).astype(np.int8)
    return {"weight": values, "weight_scale": scale}, values * scale.astype(F32)


def _words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned integers along an axis, 32 bits at a time, the first in the lowest bits."""
    codes = np.moveaxis(codes, axis, -1)
    each = 32 // bits
    codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], -codes.shape[-1] % each), codes.dtype)], -1)
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // each), np.uint64)
    for i in range(codes.shape[-1]):
        words[..., i // each] |= codes[..., i].astype(np.uint64) << np.uint64(bits * (i % each))
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def _asymmetric(w: np.ndarray, size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned codes [out, in], zero points and factors [out, groups], and what they stand for."""
    grouped, top = _groups(w, size), 2**bits - 1
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scale = ((high - low) / top).astype(np.float16).astype(F32)
    # GPTQ stores them less 1, so 0 is not used.
    zero = np.clip(np.rint(-low / scale), 1, top).astype(np.int64)
    codes = np.clip(np.rint(grouped / scale[..., None]) + zero[..., None], 0, top).astype(np.int64)
    wide = (codes - zero[..., None]) * scale[..., None]
    return codes.reshape(w.shape), zero, scale, wide.reshape(w.shape).astype(F32)


def packed_int4(w: np.ndarray, *, size: int = 16, symmetric: bool = True) -> StepHidden:
    """compressed-tensors' pack-quantized."""
    if symmetric:
        grouped = _groups(w, size)
        scale = (np.abs(grouped).max(-1) / 7).astype(BF16)
        signed = np.clip(np.rint(grouped / scale.astype(F32)[..., None]), -8, 7)
        wide = (signed * scale.astype(F32)[..., None]).reshape(w.shape)
        codes, more = (signed + 8).astype(np.int64).reshape(w.shape), {}
    else:
        codes, zero, scale, wide = _asymmetric(w, size, 4)
        more = {"weight_zero_point": _words(zero, 4, 0)}
    stored = {"weight_packed": _words(codes, 4, -1), "weight_scale": scale, "weight_shape": np.asarray(w.shape)}
    return stored | more, wide


def gptq(w: np.ndarray, *, size: int = 16, bits: int = 4, in_order: bool = True, offset: int = 1) -> StepHidden:
    """GPTQ's words; with `in_order` False, inputs belong to groups in a random order."""
    order = np.arange(w.shape[1]) if in_order else np.random.default_rng(0).permutation(w.shape[1])
    codes, zero, scale, wide = _asymmetric(w[:, order], size, bits)
    back = np.argsort(order)
    stored = {
        "qweight": _words(codes[:, back].T, bits, 0),
        "qzeros": _words(zero.T - offset, bits, 1),
        "scales": scale.T.astype(np.float16),
        "g_idx": (back // size).astype(np.int32),
    }
    return stored, wide[:, back]


def awq(w: np.ndarray, *, size: int = 16) -> StepHidden:
    """AWQ's words: eight columns in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zero, scale, wide = _asymmetric(w, size, 4)

    def words(v: np.ndarray) -> np.ndarray:
        return _words(v.reshape(v.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(v.shape), 4, 1)

    return {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T.astype(np.float16)}, wide


Format = Callable[[np.ndarray], StepHidden]
_MODULES = r".*\.((in|out|[qkvo]|up|down|gate|eh|fc[12]_latent)_proj|(in|out)put_linear)"


def _everywhere(kind: Format, method: str, **how: Any) -> tuple[dict[str, Any], dict[str, Format]]:
    return {"quant_method": method, **how}, {_MODULES: kind}


METHODS: dict[str, tuple[dict[str, Any], dict[str, Format]]] = {
    "modelopt FP8": _everywhere(fp8, "modelopt", quant_algo="FP8"),
    "modelopt NVFP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {_MODULES: nvfp4, "lm_head": nvfp4}),
    "modelopt W4A16_NVFP4": _everywhere(partial(nvfp4, activations=False), "modelopt", quant_algo="W4A16_NVFP4"),
    "modelopt MXFP8": _everywhere(mxfp8, "modelopt", quant_algo="MXFP8"),
    "compressed FP8 tensor": _everywhere(partial(fp8, activations=False), "compressed-tensors"),
    "compressed FP8 channel": _everywhere(partial(fp8, per="channel", activations=False), "compressed-tensors"),
    "compressed FP8 block": _everywhere(
        partial(fp8_blocks, name="weight_scale"),
        "compressed-tensors",
        config_groups={"group_0": {"weights": {"strategy": "block", "block_structure": [48, 48]}}},
    ),
    "compressed INT8": _everywhere(int8, "compressed-tensors"),
    "compressed NVFP4": _everywhere(partial(nvfp4, compressed=True), "compressed-tensors"),
    "compressed INT4": _everywhere(packed_int4, "compressed-tensors"),
    "compressed INT4 asymmetric": _everywhere(partial(packed_int4, symmetric=False), "compressed-tensors"),
    "block FP8": _everywhere(fp8_blocks, "fp8", weight_block_size=[48, 48]),
    "GPTQ": _everywhere(gptq, "gptq", bits=4, group_size=16),
    "GPTQ 8 bits": _everywhere(partial(gptq, bits=8), "gptq", bits=8, group_size=16),
    "GPTQ second format": _everywhere(partial(gptq, offset=0), "gptq", bits=4, checkpoint_format="gptq_v2"),
    "GPTQ act-order": _everywhere(partial(gptq, in_order=False), "gptq", bits=4, desc_act=True),
    "AWQ": _everywhere(awq, "awq", bits=4, group_size=16, version="gemm"),
}
"""By name: what config.json says, and the modules with their format, by regular expression."""

MIXED_FORMATS: dict[str, Format] = {
    r"backbone\..*\.experts\.\d+\.(up|down)_proj": nvfp4,
    r"backbone\..*\.shared_experts\.(up|down)_proj": fp8,
    r"backbone\..*\.(in|out)_proj": fp8,
}
"""As NVIDIA's Nemotron-3 Super NVFP4: experts, shared experts and Mamba projections; attention and draft layer wide."""


def write_quantized(
    directory: Path,
    hf_config: Mapping[str, Any],
    formats: Mapping[str, Format],
    description: Mapping[str, Any],
    *,
    kv_scales: float | None = None,
) -> tuple[Path, Path]:
    """A checkpoint with some modules quantized, and the wide one that it stands for (float32).

    Args:
        directory: both go beneath it, as `narrow` and `wide`.
        hf_config: of the model.
        formats: by regular expression (full match) of a module's name; other modules stay wide.
        description: quantization_config.
        kv_scales: what attention's scales of cached keys and values are; None: it has none.
    """
    stored: Tensors = {}
    wide: Tensors = {}
    for name, value in sorted(_numbers(json.dumps(hf_config)).items()):
        module = name.removesuffix(".weight")
        if kv_scales is not None and module.endswith(("k_proj", "v_proj")):
            stored[f"{module}.{module[-6]}_scale"] = np.asarray(kv_scales, F32)
        kind = next((one for pattern, one in formats.items() if re.fullmatch(pattern, module)), None)
        if kind is None or (value.ndim == 3 and kind in (gptq, awq)):
            stored[name] = wide[name] = value
            continue
        parts, wide[name] = kind(value)
        stored |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    for kind_of, content, extra in (("narrow", stored, {"quantization_config": dict(description)}), ("wide", wide, {})):
        folder = directory / kind_of
        folder.mkdir(parents=True)
        fields = {**hf_config, **extra, "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(fields, indent=1))
        save_file({k: np.ascontiguousarray(v) for k, v in content.items()}, folder / "model.safetensors")
    return directory / "narrow", directory / "wide"


def write_mixed(directory: Path) -> tuple[Path, Path]:
    """A Nemotron-H with experts in NVFP4, shared experts and Mamba in FP8, and the rest wide."""
    hf_config = config_of("moe")
    words = {nvfp4: {"quant_algo": "NVFP4", "group_size": 16}, fp8: {"quant_algo": "FP8"}}
    modules = [name.removesuffix(".weight") for name in sorted(_numbers(json.dumps(hf_config)))]
    kinds = {m: kind for m in modules for pattern, kind in MIXED_FORMATS.items() if re.fullmatch(pattern, m)}
    description = {
        "quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.41.0"},
        "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8",
        "quantized_layers": {module: words[kind] for module, kind in kinds.items()},
        "ignore": ["lm_head", "mtp*", "*conv1d*", "*gate"],
    }  # fmt: skip
    return write_quantized(directory, hf_config, MIXED_FORMATS, description)
