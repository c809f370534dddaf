"""Quantized weights as compressed-tensors writes them: their tensors, and their fields in config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from checkpoints.quantized.description import COMPRESSED
from checkpoints.quantized.packing import pack, pack_fp4
from checkpoints.quantized.rounding import Rounding
from checkpoints.quantized.stored import F32, InvalidTensor

_FORMATS = {
    "int8": ("int-quantized", "channel", 8),
    "fp8": ("float-quantized", "channel", 8),
    "int4": ("pack-quantized", "group", 4),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", 4),
}
"""The format's name, what has a scale, and bits."""
_PACKED_AT_ONCE = 8


def tensors_of(rounding: Rounding, wide: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a module, by suffix, that represent a weight [*lead, outputs, inputs].

    Raises:
        InvalidTensor: the format has no such weights.
    """
    if rounding.kind == "int4" and (wide.ndim != 2 or wide.shape[-1] % _PACKED_AT_ONCE):
        raise InvalidTensor(
            f"int4 in compressed-tensors' form is for matrices of whole words, and this is {list(wide.shape)}"
        )
    parts = rounding.round(wide)
    values = parts["values"]
    if rounding.kind in ("int8", "fp8"):
        return {"weight": values, "weight_scale": parts["channel_scale"][..., None].astype(F32)}
    by_output = np.ascontiguousarray(np.swapaxes(parts["group_scale"], -1, -2))
    if rounding.kind == "int4":
        codes = (values.astype(np.int8) + 8).astype(np.uint8)
        shape = np.asarray(wide.shape, np.int64)
        return {"weight_packed": pack(codes, 4), "weight_scale": by_output, "weight_shape": shape}
    of_tensor = np.atleast_1d(np.reciprocal(parts["channel_scale"][..., 0]))
    return {"weight_packed": pack_fp4(values), "weight_scale": by_output, "weight_global_scale": of_tensor}


def description_of(rounded: Mapping[str, Rounding], ignored: Collection[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint.

    Args:
        rounded: by the names of modules.
        ignored: names of the modules whose weights are wide.
    """
    kinds = sorted(set(rounded.values()), key=lambda each: each.group)
    groups = {}
    for number, kind in enumerate(kinds):
        modules = sorted(name for name, own in rounded.items() if own == kind)
        _, strategy, bits = _FORMATS[kind.kind]
        weights = {
            "num_bits": bits,
            "type": "float" if "fp" in kind.kind else "int",
            "strategy": strategy,
            "group_size": kind.group or None,
            "symmetric": True,
            "dynamic": False,
        }
        groups[f"group_{number}"] = {"targets": ["Linear"] if len(kinds) == 1 else modules, "weights": weights}
    return {
        "quant_method": COMPRESSED,
        "format": _FORMATS[kinds[0].kind][0] if kinds else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }
