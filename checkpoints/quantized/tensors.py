"""The tensors of a checkpoint. Each quantized weight is one tensor under the name of the unquantized weight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from checkpoints.errors import CheckpointError, listing
from checkpoints.quantized import bitsandbytes, floats, integers
from checkpoints.quantized.description import AWQ, GPTQ, Quantization
from checkpoints.quantized.stored import InvalidTensor, Module, Shapes, StoredWeight
from checkpoints.tensors.tensor_set import TensorSet

_Reader = Callable[[Module, Quantization], StoredWeight]
_PACKED = {"U8": floats.fp4, "I32": integers.pack_quantized}
_FUSED_SCALES = ("scale", "scale_inv", "weight_scale", "weight_scale_inv")
"""Ends of the names of scales of all experts' weights in one tensor."""
CACHE_SCALES = r".*\.([kv]_scale|kv_scale)"
"""Names of the factors that divide keys and values in 8 bits."""
UNUSED_SCALES = (
    r".*\.(q_scale|prob_output_scale|[qkv]_proj\.output_scale|(k_proj\.k|v_proj\.v)_(bias|zero_point))"
    r"|.*_bmm_quantizer\..*"
)
"""Names of what is for attention in 8 bits, and for keys and values in 4 bits."""


class LogicalTensors:
    """The tensors of a checkpoint: unquantized ones as stored, and quantized weights under `NAME.weight`.

    Raises (from the constructor):
        CheckpointError: parts of quantized weights are missing, left over or of the wrong shape; it names them.
    """

    def __init__(self, where: str, tensors: TensorSet, how: Quantization | None, wide: Shapes = dict) -> None:
        self._tensors = tensors
        self.quantized: dict[str, StoredWeight] = {}
        """The quantized weights by logical name."""
        wrong: list[str] = []
        used: set[str] = set()
        for name in sorted(tensors.names):
            try:
                found = _read(tensors, name, how, wide)
            except InvalidTensor as error:
                wrong.append(str(error))
                continue
            if found is not None:
                logical, weight = found
                self.quantized[logical] = weight
                used.update(weight.uses)
        self._wide = tensors.names - used
        # A scale without its weight is reported by the code that matches names; a weight without its scale, here.
        wrong += [
            f"{name} is {tensors.dtype(name)} and has no scale"
            for name in sorted(self._wide)
            if "F8" in tensors.dtype(name) and not name.endswith(("_scale", "_scale_inv"))
        ]
        if wrong:
            raise CheckpointError(f"{where}: {len(wrong)} quantized weights are not whole: {listing(wrong)}")

    @property
    def names(self) -> set[str]:
        """The names of all weights."""
        return self._wide | set(self.quantized)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape that a tensor has, or would have if it were wide."""
        if name in self.quantized:
            return self.quantized[name].shape
        stored = self._tensors.shape(name)
        return () if stored == (1,) and re.fullmatch(CACHE_SCALES, name) else stored

    def view(self, name: str) -> np.ndarray:
        """Returns the values; of a quantized weight, the values that it represents."""
        return self.quantized[name].wide() if name in self.quantized else self._tensors.view(name)

    def release(self, name: str) -> None:
        """Releases the memory of a tensor that has been copied."""
        for used in self.quantized[name].uses if name in self.quantized else (name,):
            self._tensors.release(used)

    def __str__(self) -> str:
        """Returns the quantized modules, and their formats."""
        return by_place((weight.label, name) for name, weight in self.quantized.items())


def by_place(quantized: Iterable[tuple[str, str]]) -> str:
    """Which weights are quantized in which way, in words: pairs of a way and a weight's name, all layers together."""
    kinds: dict[str, Counter[str]] = {}
    for label, name in quantized:
        places = re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight")).split(".*.")
        # Omits layer numbers and the common prefix before them.
        kinds.setdefault(label, Counter())[".*.".join(places[1:]) or places[0]] += 1
    return "; ".join(
        f"{label}: " + ", ".join(f"{place} ({count})" for place, count in sorted(found.items()))
        for label, found in sorted(kinds.items())
    )


def _read(tensors: TensorSet, name: str, how: Quantization | None, wide: Shapes) -> tuple[str, StoredWeight] | None:
    """The quantized weight whose values a tensor contains, with its logical name; None if it contains none."""
    parent, _, suffix = name.rpartition(".")
    module, logical, kind = Module(tensors, parent, wide=wide), f"{parent}.weight", tensors.dtype(name)
    read: _Reader | None = None
    if suffix == "qweight" and how is not None and how.method in (GPTQ, AWQ):
        read = integers.qweight
    elif suffix == "weight_packed":
        read = _PACKED.get(kind)
    elif suffix == "weight":
        read = _reader(module, kind)
    elif len(tensors.shape(name)) == 3 and any(f"{name}_{scale}" in tensors.names for scale in _FUSED_SCALES):
        module, logical = Module(tensors, name, fused=True), name
        read = _reader(module, kind)
    elif (base := name.removesuffix("_blocks")) != name and f"{base}_scales" in tensors.names:
        module, logical, read = Module(tensors, base, fused=True), base, floats.fp4
    if read is None:
        return None
    if how is None:
        raise InvalidTensor(f"{name} is {kind}, but config.json describes no quantization")
    return logical, read(module, how)


def _reader(module: Module, kind: str) -> _Reader | None:
    """Returns the reader of a tensor `weight` of this dtype, by its companions; None: it is wide."""
    if kind == "U8" and (module.has("weight.absmax") or module.has("weight.quant_map")):
        return bitsandbytes.four_bits
    if kind == "I8" and module.has("SCB"):
        return bitsandbytes.int8
    if kind == "U8" and module.has("weight_scale") and module.dtype("weight_scale") in ("F16", "BF16", "F32"):
        return integers.int4
    return {"F8_E4M3": floats.fp8, "I8": integers.int8, "U8": floats.fp4}.get(kind)
