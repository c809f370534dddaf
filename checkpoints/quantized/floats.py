"""Weights in 8 and 4 bits of floating point.

* FP8 (ModelOpt, compressed-tensors): `weight` e4m3 [out, in]; `weight_scale`, one number or [out] or [out, 1].
* FP8 by blocks (DeepSeek, Qwen; compressed-tensors): `weight_scale_inv`, or `weight_scale`, [out / 128, in / 128]
  rounded up. Either is a factor of the weight. ModelOpt writes `weight_scale` [out / 128, 1, in / 128, 1].
* MXFP8 (OCP Microscaling, section 5): `weight_scale`, exponents [out, in / 32] as bytes: 2^(byte - 127).
* NVFP4: pairs of e2m1 in bytes [out, in / 2], the first in the lower nibble; `weight_scale` e4m3 [out, in / 16]; and
  one number for the tensor, which ModelOpt (`weight`, `weight_scale_2`) multiplies by, and compressed-tensors
  (`weight_packed`, `weight_global_scale`) divides by.
* MXFP4: such pairs, with exponents as MXFP8; all experts also as `NAME_blocks` [experts, out, in / 32, 16] and
  `NAME_scales`.
"""

from __future__ import annotations

import numpy as np

from checkpoints.quantized.description import Quantization
from checkpoints.quantized.packing import unpack_fp4
from checkpoints.quantized.stored import BF16, F32, FP4, FP8, INPUT_SCALE, InvalidTensor, Module, Part, StoredWeight

NVFP4_GROUP, MX_GROUP = 16, 32
EXPONENTS = "U8", "F8_E8M0"


def fp8(module: Module, how: Quantization) -> StoredWeight:
    """Returns a weight in e4m3, with its scale.

    Raises:
        InvalidTensor: the scale is missing, or of the wrong shape.
    """
    shape = module.shape("weight")
    *lead, outputs, inputs = shape
    values = Part(FP8, lambda: module.view("weight"))
    module.allow("input_global_scale", INPUT_SCALE)
    if module.has("weight_scale_inv"):
        return _by_blocks(module, shape, "weight_scale_inv", values, how)
    scale = module.shape("weight_scale")
    if module.dtype("weight_scale") in EXPONENTS:
        parts = {"values": values, "group_scale": _powers(module, "weight_scale", shape)}
        return module.weight(f"MXFP8, groups of {MX_GROUP}", shape, parts)
    blocks = tuple(-(-n // size) for n, size in zip((outputs, inputs), how.block, strict=True))
    if (scale == (*lead, *blocks) and scale[-2:] not in ((outputs, 1), (1, 1))) or len(scale) == len(shape) + 2:
        return _by_blocks(module, shape, "weight_scale", values, how)
    part = module.scale_of_channels("weight_scale", shape)
    label = "FP8, a scale per tensor" if np.prod(scale) == 1 else "FP8, a scale per channel"
    return module.weight(label, shape, {"values": values, "channel_scale": part, **module.input_scale(shape)})


def _by_blocks(module: Module, shape: tuple[int, ...], suffix: str, values: Part, how: Quantization) -> StoredWeight:
    *lead, outputs, inputs = shape
    rows, columns = how.block
    blocks = (*lead, -(-outputs // rows), -(-inputs // columns))
    if module.shape(suffix) != (*blocks[:-1], 1, blocks[-1], 1):
        module.expect(suffix, blocks)
    # Groups have one size here: where blocks do not divide the inputs, smaller ones that do, with the same scales.
    size = int(np.gcd(inputs, columns))

    def read() -> np.ndarray:
        scale = module.view(suffix).astype(np.float32).reshape(blocks)
        scale = np.repeat(scale, rows, axis=-2)[..., :outputs, :]
        each = np.arange(0, inputs, size) // columns
        return np.swapaxes(scale[..., each], -1, -2)

    scale = Part(F32, read, inputs // size)
    return module.weight(f"FP8, a scale per {rows} x {columns} block", shape, {"values": values, "group_scale": scale})


def _powers(module: Module, suffix: str, shape: tuple[int, ...]) -> Part:
    """Returns powers of two that are stored as exponents, for each group of inputs."""
    groups = shape[-1] // MX_GROUP
    module.expect(suffix, (*shape[:-1], groups), *EXPONENTS)

    def read() -> np.ndarray:
        exponents = module.view(suffix).view(np.uint8).astype(np.int32) - 127
        return np.swapaxes(np.ldexp(np.float32(1), exponents), -1, -2)

    return Part(BF16, read, groups)  # holds every power of two that there is


def fp4(module: Module, how: Quantization) -> StoredWeight:
    """Returns a weight in e2m1: NVFP4 or MXFP4.

    Raises:
        InvalidTensor: a scale is missing, or of the wrong shape.
    """
    packed = next(suffix for suffix in ("blocks", "weight_packed", "weight") if module.has(suffix))
    scale, compressed = "scales" if packed == "blocks" else "weight_scale", packed == "weight_packed"
    *lead, outputs = module.shape(packed)[: -2 if packed == "blocks" else -1]
    inputs = 2 * int(np.prod(module.shape(packed)[len(lead) + 1 :]))
    shape = (*lead, outputs, inputs)
    values = Part(FP4, lambda: unpack_fp4(module.view(packed).reshape(*lead, outputs, -1)))
    power_of_two = module.dtype(scale) in EXPONENTS
    size = MX_GROUP if power_of_two else NVFP4_GROUP
    if inputs % size:
        raise InvalidTensor(f"{module.name}.{packed} has {inputs} inputs, which groups of {size} do not divide")
    module.allow(INPUT_SCALE, "input_global_scale")
    if power_of_two:
        parts = {"values": values, "group_scale": _powers(module, scale, shape)}
        return module.weight(f"MXFP4, groups of {size}", shape, parts)
    module.expect(scale, (*lead, outputs, inputs // size), "F8_E4M3")
    whole = "weight_global_scale" if compressed else "weight_scale_2"
    parts = {
        "values": values,
        "group_scale": module.scale_of_groups(scale, shape, inputs // size, FP8),
        "channel_scale": module.scale_of_channels(whole, shape, inverse=compressed),
    }
    return module.weight(f"NVFP4, groups of {size}", shape, parts)
