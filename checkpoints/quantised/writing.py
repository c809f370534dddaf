"""Quantized weights as compressed-tensors writes them: their tensors, and their fields in config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from checkpoints.quantised.description import COMPRESSED
from checkpoints.quantised.packing import pack, pack_fp4
from checkpoints.quantised.rounding import Rounding
from checkpoints.quantised.stored import F32, InvalidTensor

_FORMATS = {
    "int8": "int-quantized",
    "fp8": "float-quantized",
    "int4": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
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
    by_output = np.swapaxes(parts["group_scale"], -1, -2) if "group_scale" in parts else None
    if rounding.kind == "int4":
        codes = (values.astype(np.int8) + 8).astype(np.uint8)
        shape = np.asarray(wide.shape, np.int64)
        return {"weight_packed": pack(codes, 4), "weight_scale": _whole(by_output), "weight_shape": shape}
    if rounding.kind == "nvfp4":
        of_tensor = np.reciprocal(parts["channel_scale"][..., 0])
        each = of_tensor.reshape(-1) if of_tensor.ndim == 0 else of_tensor
        return {"weight_packed": pack_fp4(values), "weight_scale": _whole(by_output), "weight_global_scale": each}
    return {"weight": values, "weight_scale": parts["channel_scale"][..., None].astype(F32)}


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
        targets = ["Linear"] if len(kinds) == 1 else modules
        groups[f"group_{number}"] = {"targets": targets, "weights": _weights(kind)}
    return {
        "quant_method": COMPRESSED,
        "format": _FORMATS[kinds[0].kind] if kinds else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }


def _weights(rounding: Rounding) -> dict[str, Any]:
    strategy = {"int8": "channel", "fp8": "channel", "int4": "group", "nvfp4": "tensor_group"}[rounding.kind]
    return {
        "num_bits": 8 if rounding.kind in ("int8", "fp8") else 4,
        "type": "float" if "fp" in rounding.kind else "int",
        "strategy": strategy,
        "group_size": rounding.group or None,
        "symmetric": True,
        "dynamic": False,
    }


def _whole(values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return np.ascontiguousarray(values)
