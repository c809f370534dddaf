"""Weights in 8 and 4 bits of floating point.

* FP8 (ModelOpt, compressed-tensors): `weight` e4m3 [out, in]; `weight_scale`, one number or [out] or [out, 1].
* FP8 by blocks (DeepSeek, Qwen; compressed-tensors): `weight_scale_inv`, or `weight_scale`, [out / 128, in / 128]
  rounded up. Either is a factor of the weight.
* MXFP8 (OCP Microscaling, section 5): `weight_scale`, exponents [out, in / 32] as bytes: 2^(byte - 127).
* NVFP4: pairs of e2m1 in bytes [out, in / 2], the first in the lower nibble; `weight_scale` e4m3 [out, in / 16]; and
  one number for the tensor, which ModelOpt (`weight`, `weight_scale_2`) multiplies by, and compressed-tensors
  (`weight_packed`, `weight_global_scale`) divides by.
"""

from __future__ import annotations

import numpy as np

from checkpoints.quantised.description import Quantisation
from checkpoints.quantised.packing import unpack_fp4
from checkpoints.quantised.stored import (
    BF16,
    F32,
    FP4,
    FP8,
    INPUT_SCALE,
    InvalidTensor,
    Module,
    Part,
    StoredWeight,
)

NVFP4_GROUP, MXFP8_GROUP = 16, 32


def fp8(module: Module, how: Quantisation) -> StoredWeight:
    """Returns a weight in e4m3, with its scale.

    Raises:
        InvalidTensor: the scale is missing, or of the wrong shape.
    """
    shape = module.shape("weight")
    values = Part(FP8, lambda: module.view("weight"))
    module.allow("input_global_scale")
    if module.has("weight_scale_inv"):
        module.allow(INPUT_SCALE)
        return _by_blocks(module, shape, "weight_scale_inv", values, how)
    scale = module.shape("weight_scale")
    *lead, outputs, inputs = shape
    if module.dtype("weight_scale") in ("U8", "F8_E8M0"):
        module.allow(INPUT_SCALE)
        return _mxfp8(module, shape, values)
    blocks = tuple(-(-n // size) for n, size in zip((outputs, inputs), how.block, strict=True))
    if scale == (*lead, *blocks) and scale[-2:] not in ((outputs, 1), (1, 1)):
        module.allow(INPUT_SCALE)
        return _by_blocks(module, shape, "weight_scale", values, how)
    part = module.scale_of_channels("weight_scale", shape)
    label = "FP8, a scale per tensor" if np.prod(scale) == 1 else "FP8, a scale per channel"
    parts = {"values": values, "channel_scale": part, **module.input_scale(shape)}
    return StoredWeight(label, shape, parts, tuple(module.uses))


def _by_blocks(module: Module, shape: tuple[int, ...], suffix: str, values: Part, how: Quantisation) -> StoredWeight:
    *lead, outputs, inputs = shape
    rows, columns = how.block
    module.expect(suffix, (*lead, -(-outputs // rows), -(-inputs // columns)))
    # Groups have one size here: where blocks do not divide the inputs, smaller ones that do, with the same scales.
    size = int(np.gcd(inputs, columns))

    def read() -> np.ndarray:
        scale = np.repeat(module.view(suffix).astype(np.float32), rows, axis=-2)[..., :outputs, :]
        each = np.arange(0, inputs, size) // columns
        return np.swapaxes(scale[..., each], -1, -2)

    scale = Part(F32, read, inputs // size)
    label = f"FP8, a scale per {rows} x {columns} block"
    return StoredWeight(label, shape, {"values": values, "group_scale": scale}, tuple(module.uses))


def _mxfp8(module: Module, shape: tuple[int, ...], values: Part) -> StoredWeight:
    *lead, outputs, inputs = shape
    groups = inputs // MXFP8_GROUP
    module.expect("weight_scale", (*lead, outputs, groups), "U8", "F8_E8M0")

    def read() -> np.ndarray:
        exponents = module.view("weight_scale").view(np.uint8).astype(np.int32) - 127
        return np.swapaxes(np.ldexp(np.float32(1), exponents), -1, -2)

    scale = Part(BF16, read, groups)  # holds every power of two that there is
    parts = {"values": values, "group_scale": scale}
    return StoredWeight(f"MXFP8, groups of {MXFP8_GROUP}", shape, parts, tuple(module.uses))


def nvfp4(module: Module, how: Quantisation) -> StoredWeight:
    """Returns a weight in e2m1.

    Raises:
        InvalidTensor: a scale is missing, or of the wrong shape.
    """
    compressed = module.has("weight_packed")
    packed, whole = ("weight_packed", "weight_global_scale") if compressed else ("weight", "weight_scale_2")
    *lead, outputs, pairs = module.shape(packed)
    shape = (*lead, outputs, 2 * pairs)
    if shape[-1] % NVFP4_GROUP:
        raise InvalidTensor(
            f"{module.name}.{packed} has {shape[-1]} inputs, which groups of {NVFP4_GROUP} do not divide"
        )
    module.expect("weight_scale", (*lead, outputs, shape[-1] // NVFP4_GROUP), "F8_E4M3")
    module.allow("input_scale", "input_global_scale")
    parts = {
        "values": Part(FP4, lambda: unpack_fp4(module.view(packed))),
        "group_scale": module.scale_of_groups("weight_scale", shape, shape[-1] // NVFP4_GROUP, FP8),
        "channel_scale": module.scale_of_channels(whole, shape, inverse=compressed),
    }
    return StoredWeight(f"NVFP4, groups of {NVFP4_GROUP}", shape, parts, tuple(module.uses))
