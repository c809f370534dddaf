"""Weights in 8 and 4 bits of integers.

* compressed-tensors INT8: `weight` int8 [out, in]; `weight_scale`, one number or [out, 1] or [out, groups];
  `weight_zero_point` of the same shape, if any.
* compressed-tensors "pack-quantized": `weight_packed` [out, in / n], n integers plus 2^(bits-1) in each 32-bit word;
  `weight_shape`; `weight_scale` [out, groups]; `weight_zero_point` [out / n, groups], packed along the outputs.
* GPTQ, AutoRound: `qweight` [in / n, out], packed along the inputs; `scales` [groups, out]; `qzeros`
  [groups, out / n], packed along the outputs and, in the first format, less 1; `g_idx` [in], the group of each input.
* ModelOpt's INT4 (W4A16_AWQ, W4A8_AWQ): `weight` bytes [out / 2, in], of two outputs each, the first in the lower
  nibble; `weight_scale` [out, groups]. `weight_scale_2`, of products in 8 bits, is not used.
* AWQ: `qweight` [in, out / 8] and `qzeros` [groups, out / 8], packed along the outputs in an order of its own;
  `scales`.

Without `qzeros`, the zero point is the middle. The number of bits of a module follows from the shapes of its tensors.
"""

from __future__ import annotations

import numpy as np

from checkpoints.quantized.description import Quantization
from checkpoints.quantized.packing import unpack, unpack_awq
from checkpoints.quantized.stored import BF16, F32, INPUT_SCALE, INT4, INT8, InvalidTensor, Module, Part, StoredWeight


def int8(module: Module, how: Quantization) -> StoredWeight:
    """Returns a weight in int8 as it is.

    Raises:
        InvalidTensor: a tensor is missing, or of the wrong shape.
    """
    shape = module.shape("weight")
    *lead, outputs, inputs = shape
    values, scale = Part(INT8, lambda: module.view("weight")), module.shape("weight_scale")
    module.allow("input_zero_point", INPUT_SCALE)
    grouped = scale[:-1] == (*lead, outputs) and scale[-1] > 1
    if not grouped and not module.has("weight_zero_point"):
        parts = {"values": values, "channel_scale": module.scale_of_channels("weight_scale", shape)}
        parts |= {} if module.has("input_zero_point") else module.input_scale(shape)
        return module.weight("INT8, a scale per channel", shape, parts)
    groups = scale[-1] if grouped else 1
    _divides(module, "weight_scale", inputs, groups)
    parts = {"values": values, "group_scale": module.scale_of_groups("weight_scale", shape, groups, F32)}
    if module.has("weight_zero_point"):
        parts["group_zero"] = module.scale_of_groups("weight_zero_point", shape, groups, INT8)
    return module.weight(f"INT8, groups of {inputs // groups}", shape, parts)


def pack_quantized(module: Module, how: Quantization) -> StoredWeight:
    """compressed-tensors' packed integers.

    Raises:
        InvalidTensor: a tensor is missing, or of the wrong shape.
    """
    *lead, outputs, words = module.shape("weight_packed")
    module.expect("weight_shape", (2,))
    logical = tuple(int(n) for n in module.view("weight_shape"))
    if len(logical) != 2 or logical[0] != outputs or lead:
        raise InvalidTensor(
            f"{module.name}.weight_packed is {[*lead, outputs, words]}, its weight_shape {list(logical)}"
        )
    inputs = logical[1]
    bits = next((bits for bits in (4, 8, 2, 3) if -(-inputs // (32 // bits)) == words), None)
    if bits is None:
        raise InvalidTensor(
            f"{module.name}.weight_packed has {words} words for {inputs} inputs: neither 2, 3, 4 nor 8 bits each"
        )
    groups = module.shape("weight_scale")[-1]
    _divides(module, "weight_scale", inputs, groups)
    offset, dtype = 2 ** (bits - 1), INT4 if bits <= 4 else INT8

    def values() -> np.ndarray:
        return _less(unpack(module.view("weight_packed"), bits, -1)[:, :inputs], offset).astype(dtype)

    scale_dtype = BF16 if module.dtype("weight_scale") == "BF16" else F32
    parts = {
        "values": Part(dtype, values),
        "group_scale": module.scale_of_groups("weight_scale", logical, groups, scale_dtype),
    }
    if module.has("weight_zero_point"):
        module.expect("weight_zero_point", (-(-outputs // (32 // bits)), groups), "I32")

        def zero() -> np.ndarray:
            return _less(unpack(module.view("weight_zero_point"), bits, 0)[:outputs], offset).T

        parts["group_zero"] = Part(INT8, zero, groups)
    return _by_groups(module, "weight_g_idx", f"INT{bits}", logical, parts, groups)


def qweight(module: Module, how: Quantization) -> StoredWeight:
    """GPTQ's or AWQ's packed integers.

    Raises:
        InvalidTensor: a tensor is missing, or of the wrong shape.
    """
    rows, columns = module.shape("qweight")
    is_awq = module.shape("scales")[-1] == 8 * columns  # packed along the outputs
    if is_awq:
        bits, inputs, outputs = 4, rows, 8 * columns
    else:
        bits = _gptq_bits(module, rows, columns, how)
        inputs, outputs = rows * (32 // bits), columns
    groups = module.shape("scales")[0]
    _divides(module, "scales", inputs, groups)
    module.expect("qweight", (rows, columns), "I32")
    module.expect("scales", (groups, outputs))
    offset, dtype = 2 ** (bits - 1), INT4 if bits <= 4 else INT8

    def read(suffix: str, axis: int) -> np.ndarray:
        words = module.view(suffix)
        return unpack_awq(words) if is_awq else unpack(words, bits, axis)

    def zero() -> np.ndarray:
        return (read("qzeros", -1).astype(np.int16) + (0 if is_awq else how.zero_offset or 0) - offset).astype(np.int16)

    parts = {
        "values": Part(dtype, lambda: _less(read("qweight", 0), offset).astype(dtype).T),
        "group_scale": Part(F32, lambda: module.view("scales"), groups),
    }
    if how.zero_offset is None:
        module.allow("qzeros")
    elif module.has("qzeros"):
        module.expect("qzeros", (groups, outputs * bits // 32), "I32")
        # A zero point may be one more than the integers have room for.
        parts["group_zero"] = Part(INT8 if bits <= 4 else np.dtype(np.int16), zero, groups)
    return _by_groups(module, "g_idx", f"INT{bits} ({'AWQ' if is_awq else 'GPTQ'})", (outputs, inputs), parts, groups)


def _gptq_bits(module: Module, words: int, outputs: int, how: Quantization) -> int:
    """Returns the bits of a module's integers: mixed checkpoints have modules with others than the description's."""
    if module.has("g_idx"):
        bits = 32 * words / max(1, *module.shape("g_idx"))
    elif module.has("qzeros"):
        bits = 32 * module.shape("qzeros")[-1] / max(1, outputs)
    elif wide := module.wide().get(f"{module.name}.weight"):
        bits = 32 * words / wide[-1]
    else:
        by_groups = 32 * words / max(1, how.group_size * module.shape("scales")[0])
        bits = by_groups if by_groups in (2, 4, 8) else how.bits
    if bits not in (2, 4, 8):
        raise InvalidTensor(f"{module.name}.qweight has {bits:g} bits for each input: 2, 4 and 8 are supported")
    return int(bits)


def int4(module: Module, how: Quantization) -> StoredWeight:
    """ModelOpt's integers, two outputs in a byte.

    Raises:
        InvalidTensor: a tensor is missing, or of the wrong shape.
    """
    *lead, pairs, inputs = module.shape("weight")
    shape, groups = (*lead, 2 * pairs, inputs), module.shape("weight_scale")[-1]
    _divides(module, "weight_scale", inputs, groups)
    module.allow("weight_scale_2", INPUT_SCALE)

    def values() -> np.ndarray:
        packed = module.view("weight")
        outputs = np.stack([packed & 0xF, packed >> 4], -2).reshape(shape)
        return _less(outputs ^ np.uint8(8), 8).astype(INT4)

    parts = {"values": Part(INT4, values), "group_scale": module.scale_of_groups("weight_scale", shape, groups, F32)}
    return module.weight(f"INT4, groups of {inputs // groups}", shape, parts)


def _less(unsigned: np.ndarray, offset: int) -> np.ndarray:
    """Unsigned bytes as signed ones."""
    return (unsigned - np.uint8(offset)).view(np.int8)


def _divides(module: Module, suffix: str, inputs: int, groups: int) -> None:
    if groups < 1 or inputs % groups:
        raise InvalidTensor(f"{module.name}.{suffix} has {groups} groups, which do not divide {inputs} inputs")


def _by_groups(
    module: Module, order: str, label: str, shape: tuple[int, ...], parts: dict[str, Part], groups: int
) -> StoredWeight:
    """Returns a weight whose tensor `order`, if any, lists the groups of the inputs; widened if not in order."""
    inputs = shape[-1]
    label = f"{label}, groups of {inputs // groups}"
    if not module.has(order):
        return module.weight(label, shape, parts)
    module.expect(order, (inputs,), "I32", "I64")
    group = np.asarray(module.view(order))
    if (group < 0).any() or (group >= groups).any():
        raise InvalidTensor(f"{module.name}.{order} names groups beyond the {groups} that have scales")
    if np.array_equal(group, np.arange(inputs) // (inputs // groups)):
        return module.weight(label, shape, parts)

    def of_each(part: Part) -> Part:
        return Part(part.dtype, lambda: part.read()[group], inputs) if part.groups else part

    each = {name: of_each(part) for name, part in parts.items()}
    return module.weight(f"{label}, act-order (widened)", shape, each, narrow=False)
