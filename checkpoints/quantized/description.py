"""What a checkpoint's JSON files say about its quantization: the method, and how its tensors are to be read.

Which weights are quantized is not read here but seen from the tensors: mixed checkpoints are the normal case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json
from checkpoints.resolve import original_of

MODELOPT, COMPRESSED, FP8, GPTQ, AWQ = "modelopt", "compressed-tensors", "fp8", "gptq", "awq"
AUTO_ROUND, MXFP4, BITSANDBYTES = "auto-round", "mxfp4", "bitsandbytes"
METHODS = (MODELOPT, COMPRESSED, FP8, GPTQ, AWQ, AUTO_ROUND, MXFP4, BITSANDBYTES)
_OTHER_NAMES = {"fbgemm-fp8": COMPRESSED, "finegrained-fp8": FP8, "autoround": AUTO_ROUND, "nvfp4": MODELOPT}
_NAMED_BY = {
    "quant_algo": MODELOPT,
    "config_groups": COMPRESSED,
    "quantization_status": COMPRESSED,
    "load_in_4bit": BITSANDBYTES,
    "load_in_8bit": BITSANDBYTES,
    "autoround_version": AUTO_ROUND,
    "weight_block_size": FP8,
    "desc_act": GPTQ,
    "sym": GPTQ,
    "w_bit": AWQ,
}
"""Fields that only this method's descriptions have, for those without `quant_method`."""
_OTHER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Of ModelOpt, and of early GPTQ and AWQ: where config.json says nothing."""


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's quantized tensors are written."""

    method: str
    """One of METHODS."""
    bits: int = 4
    """Of integers that are packed (gptq, awq), where neither tensors nor the size of groups show it."""
    group_size: int = 0
    """Inputs that share a scale of packed integers; 0: unknown."""
    block: tuple[int, int] = (128, 128)
    """Outputs and inputs that share a scale where scales are of blocks."""
    zero_offset: int | None = 0
    """Number added to stored zero points: 1 in gptq's first format. None: they are the middle, whatever is stored."""


def read_quantization(directory: Path, fields: Mapping[str, Any]) -> Quantization | None:
    """From config.json's `quantization_config` or `compression_config`, or from a tool's own file; None without any.

    Args:
        directory: of the checkpoint.
        fields: its config.json.
    Raises:
        CheckpointError: a method, or a variant of one, that is not supported.
    """
    path, found = directory / "config.json", fields.get("quantization_config") or fields.get("compression_config")
    if not found:
        path = next((one for name in _OTHER_FILES if (one := directory / name).is_file()), path)
        found = None if path.name == "config.json" else read_json(path)
    if not found:
        return None
    found = _object(path, found)
    found = found if found.get("quant_method") or "quantization" not in found else _object(path, found["quantization"])
    if path.name == _OTHER_FILES[0]:
        found = {"quant_method": MODELOPT} | found
    named = (one for key, one in _NAMED_BY.items() if key in found)
    method = str(found.get("quant_method") or next(named, "unknown"))
    method = method.lower().replace("_", "-").removeprefix("intel/").removesuffix("-marlin")
    method = _OTHER_NAMES.get(method, method)
    if method == "unknown" and "group_size" in found:
        raise CheckpointError(f"{path}: weights in MLX's form are not supported; {original_of(directory)}")
    if method.startswith(MODELOPT):
        return Quantization(MODELOPT)
    if method == COMPRESSED:
        return Quantization(COMPRESSED, block=_block(path, _compressed_block(found)))
    if method == FP8:
        return Quantization(FP8, block=_block(path, found.get("weight_block_size")))
    if method in (MXFP4, BITSANDBYTES):
        return Quantization(method)
    if method in (GPTQ, AWQ):
        return _integers(path, method, found)
    if method == AUTO_ROUND:
        return _auto_round(path, found)
    raise CheckpointError(f"{path}: quantization method {method!r} is not supported; known are {', '.join(METHODS)}")


def _compressed_block(found: Mapping[str, Any]) -> Any:
    groups = found.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = [one.get("weights") for one in groups if isinstance(one, Mapping)]
    sizes = (one.get("block_structure") for one in weights if isinstance(one, Mapping))
    return next(filter(None, sizes), None)


def _integers(path: Path, method: str, found: Mapping[str, Any]) -> Quantization:
    bits = found.get("bits", found.get("w_bit", 4))
    if bits not in (2, 4, 8) or (method == AWQ and bits != 4):
        known = "4" if method == AWQ else "2, 4 and 8"
        raise CheckpointError(f"{path}: {method} with {bits!r} bits is not supported; {known}")
    version = str(found.get("version", "gemm")).lower()
    if method == AWQ and version != "gemm":
        raise CheckpointError(f"{path}: awq version {version!r} is not supported; only gemm is")
    first_format = method == GPTQ and "gptq_v2" not in (found.get("checkpoint_format"), found.get("format"))
    size = found.get("group_size", found.get("q_group_size"))
    size = size if isinstance(size, int) and size > 0 else 0
    return Quantization(method, bits=bits, group_size=size, zero_offset=int(first_format))


def _auto_round(path: Path, found: Mapping[str, Any]) -> Quantization:
    packing = str(found.get("packing_format") or "auto_round:auto_gptq").lower()
    if "llm_compressor" in packing:
        return Quantization(COMPRESSED)
    if "awq" in packing:
        return _integers(path, AWQ, {"bits": 4})
    if "gptq" not in packing and packing not in (AUTO_ROUND, "auto_round"):
        raise CheckpointError(f"{path}: packing_format {packing!r} is not supported; known are those of GPTQ and AWQ")
    first = "auto_gptq" in packing and "v2" not in packing
    how = _integers(path, GPTQ, {**found, "checkpoint_format": "gptq" if first else "gptq_v2"})
    return replace(how, zero_offset=None) if found.get("sym", True) else how


def _block(path: Path, size: Any) -> tuple[int, int]:
    if size is None:
        return Quantization.block
    if isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size):
        return size[0], size[1]
    raise CheckpointError(f"{path}: {size!r} is not the shape of a block of weights")


def _object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its description of the quantization is not an object")
    return value
