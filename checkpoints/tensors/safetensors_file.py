"""Memory-mapped safetensors files.

The format (https://github.com/huggingface/safetensors, "Format"): eight bytes, little endian, with the header's
length; the header, a JSON object of `name -> {dtype, shape, data_offsets}`; then the tensors' bytes, row major. The
package's own numpy interface copies every tensor and cannot express bfloat16, so the header is read here, and tensors
are views of the map.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, listing, one_line
from checkpoints.json_file import open_regular, reading

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# The limit of the format's reference implementation: a longer "header" is some other kind of file.
MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 32
"""Of a tensor. The product of a million sizes would take minutes."""
_AROUND = 1 << 16
"""Bytes that Linux maps around an accessed page; with thousands of small tensors they add up."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the beginning of the file."""
    end: int


class SafetensorsFile:
    """One memory-mapped file: `entries` by name, `metadata` of the file, and zero-copy views of the tensors.

    Raises (from the constructor):
        CheckpointError: the file is unreadable, truncated, or its header is not valid.
    """

    def __init__(self, path: Path, max_header: int = MAX_HEADER_BYTES) -> None:
        self.path = path
        with reading(path), open_regular(path) as file:
            self.status = os.fstat(file.fileno())
            """The status of the mapped file."""
            self.entries, self.metadata = read_header(path, file, self.status.st_size, max_header)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, name: str) -> np.ndarray:
        """Returns the tensor as a read-only view of the mapped file; nothing is read until it is used."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} has dtype {entry.dtype}, which is not supported yet")
        flat = np.frombuffer(self._map, DTYPES[entry.dtype], math.prod(entry.shape), entry.start)
        return flat.reshape(entry.shape)

    def copy(self, name: str) -> np.ndarray:
        """Returns a copy of the tensor, read from the file. Unlike a view, it is safe from programs that shorten the
        file meanwhile.

        Raises:
            CheckpointError: the file was changed.
        """
        entry = self.entries[name]
        with open_regular(self.path) as file:
            file.seek(entry.start)
            content = file.read(entry.end - entry.start)
        if len(content) != entry.end - entry.start:
            raise CheckpointError(f"{self.path}: was changed while it was loaded; start again")
        return np.frombuffer(content, DTYPES[entry.dtype]).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Lets the system drop the pages of a copied tensor, so that they do not count as this process's memory."""
        if not hasattr(self._map, "madvise"):
            return
        entry = self.entries[name]
        start = max(entry.start - _AROUND, 0)
        start -= start % mmap.PAGESIZE
        end = min(entry.end + _AROUND, len(self._map))
        if entry.end > entry.start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def read_header(path: Path, file: Any, size: int, most: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Returns a file's tensors by name, and its metadata. `size`: of the file; `most`: of the header, in bytes.

    Raises:
        CheckpointError: the header is not valid, or the file is truncated.
    """
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
    if length is None or length > most or 8 + length > size:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({size} bytes, too short for its header)")
    try:
        header = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", None) or {})
        entries = {name: _entry(8 + length, **fields) for name, fields in header.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt safetensors header ({one_line(error)})") from error
    cut = [f"{name} {list(entry.shape)}" for name, entry in entries.items() if entry.end > size]
    if cut:
        wanted = max(entry.end for entry in entries.values())
        raise CheckpointError(f"{path}: truncated ({size} of {wanted} bytes); incomplete: {listing(cut)}")
    return entries, metadata


def _entry(base: int, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorEntry:
    start, end = data_offsets
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{type(shape).__name__} of length {len(shape)} as a shape")
    entry = TensorEntry(dtype, tuple(int(n) for n in shape), base + int(start), base + int(end))
    sizes = (0, *entry.shape)
    if min(sizes) < 0 or max(sizes) >= 1 << 48 or not base <= entry.start <= entry.end:
        raise ValueError(f"impossible shape {shape} or offsets {data_offsets}")
    if dtype in DTYPES and math.prod(entry.shape) * DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{dtype} tensor of shape {shape} does not take {end - start} bytes")
    return entry
