"""Several small integers in one larger, as the formats pack them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighboring columns each nibble of a word holds, the lowest nibble first."""


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unsigned integers (uint8) from 32-bit words along an axis, the lowest bits first."""
    words = np.moveaxis(words, axis, -1).view(np.uint32)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    # One shift at a time: all at once would take eight times the memory for 32-bit intermediates.
    out = np.empty((*words.shape, len(shifts)), np.uint8)
    for i, shift in enumerate(shifts):
        out[..., i] = (words >> shift) & (2**bits - 1)
    return np.moveaxis(out.reshape(*words.shape[:-1], -1), -1, axis)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unsigned 4-bit integers from words along the last axis, in AWQ's order of columns."""
    packed = unpack(words, 4, -1)
    eights = packed.reshape(*packed.shape[:-1], -1, 8)
    return eights[..., np.argsort(AWQ_ORDER)].reshape(packed.shape)


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """float4_e2m1fn [..., 2 n] from bytes [..., n]: the lower nibble is the first of two."""
    out = np.empty((*packed.shape, 2), np.uint8)
    out[..., 0] = packed & 0xF
    out[..., 1] = packed >> 4
    return out.reshape(*packed.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)


def pack_fp4(values: np.ndarray) -> np.ndarray:
    """Returns the inverse of `unpack_fp4`."""
    codes = values.view(np.uint8).reshape(*values.shape[:-1], -1, 2)
    return codes[..., 0] | codes[..., 1] << 4


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns the inverse of `unpack` for the last axis: unsigned integers in 32-bit words (int32)."""
    count = 32 // bits
    parts = values.astype(np.uint32).reshape(*values.shape[:-1], -1, count)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(count):
        words |= parts[..., i] << np.uint32(bits * i)
    return words.view(np.int32)
