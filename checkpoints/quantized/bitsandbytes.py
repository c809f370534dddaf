"""Weights as bitsandbytes writes them.

* 8 bits: `weight` int8 [out, in]; `SCB` [out], the largest magnitude of each output, which 127 stands for.
* 4 bits: `weight`, two numbers in a byte, row by row, the first in the upper nibble; `weight.quant_map`, what each of
  16 codes stands for; `weight.absmax`, a factor for each `blocksize` numbers; `weight.quant_state.bitsandbytes__nf4`
  (or `__fp4`), the bytes of a JSON object with shape and sizes. Factors in 8 bits have `weight.nested_quant_map` and
  `weight.nested_absmax`, and the object's `nested_offset`.

Blocks of 4 bits do not follow outputs, and the 16 numbers are no format of a device, so such weights are widened.
"""

from __future__ import annotations

import json
import math

import numpy as np

from checkpoints.quantized.description import Quantization
from checkpoints.quantized.stored import F32, INT8, InvalidTensor, Module, Part, StoredWeight

STATE = "weight.quant_state.bitsandbytes__"


def int8(module: Module, how: Quantization) -> StoredWeight:
    """Returns a weight in int8 as it is.

    Raises:
        InvalidTensor: the factors are of the wrong shape, or the weight is not stored row by row.
    """
    shape = module.shape("weight")
    module.expect("SCB", shape[:-1], "F32")
    module.allow("weight_format")
    if module.has("weight_format") and (form := module.view("weight_format")).any():
        raise InvalidTensor(f"{module.name}.weight_format is {form.max()}, expected 0 (rows)")
    values, scale = Part(INT8, lambda: module.view("weight")), Part(F32, lambda: module.view("SCB") / F32.type(127))
    return module.weight("INT8 (bitsandbytes), a scale per channel", shape, {"values": values, "channel_scale": scale})


def four_bits(module: Module, how: Quantization) -> StoredWeight:
    """Returns a weight of 4 bits, to be widened.

    Raises:
        InvalidTensor: a tensor is missing, or of the wrong shape.
    """
    kind = next((kind for kind in ("nf4", "fp4") if module.has(STATE + kind)), "nf4")
    module.shape(STATE + kind)
    try:
        state = json.loads(module.view(STATE + kind).tobytes())
        shape, size = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        nested, offset = int(state.get("nested_blocksize") or 0), float(state.get("nested_offset") or 0.0)
        count = math.prod(shape)
        if min(shape) < 1 or size < 1 or nested < 0:
            raise ValueError("a size is not above 0")
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise InvalidTensor(f"{module.name}.{STATE}{kind} does not describe a weight ({error})") from None
    stored = module.shape("weight")
    if math.prod(stored) != -(-count // 2):
        raise InvalidTensor(f"{module.name}.weight is {list(stored)}, too long or short for {list(shape)}")
    blocks = -(-count // size)
    module.expect("weight.quant_map", (16,), "F32")
    module.expect("weight.absmax", (blocks,), "U8" if nested else "F32")
    if nested:
        module.expect("weight.nested_quant_map", (256,), "F32")
        module.expect("weight.nested_absmax", (-(-blocks // nested),), "F32")

    def read() -> np.ndarray:
        packed, factor = module.view("weight").reshape(-1), module.view("weight.absmax")
        if nested:
            outer = np.repeat(module.view("weight.nested_absmax"), min(nested, blocks))[:blocks]
            factor = module.view("weight.nested_quant_map")[factor] * outer + F32.type(offset)
        codes = np.stack([packed >> 4, packed & 0xF], -1).reshape(-1)[:count]
        return (module.view("weight.quant_map")[codes] * np.repeat(factor, min(size, count))[:count]).reshape(shape)

    label = f"{kind.upper()} (bitsandbytes), groups of {size} (widened)"
    return module.weight(label, shape, {"values": Part(F32, read)}, narrow=False)
