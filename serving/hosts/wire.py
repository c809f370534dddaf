"""A batch as bytes: its place in the order of calls, a digest of its form, then its arrays as they lie in memory.

Nothing is executed to read one: a host only fills batches of the forms that it has programs for.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from mamba_jax.program_cache import Look, look_of
from mamba_jax.programs import Batch

_HEADER = struct.Struct(">Q16s")


class WireError(ValueError):
    """Malformed batch, or one without a program. The message continues "cannot follow call N: "."""


class Sender:
    """Turns batches into messages."""

    def __init__(self) -> None:
        self._digests: dict[Look, bytes] = {}  # one for each program

    def to_bytes(self, number: int, batch: Batch) -> list[bytes | memoryview]:
        """A call with its place in the order of all calls, in pieces that need not be copied together."""
        look = look_of(batch)
        digest = self._digests.get(look) or self._digests.setdefault(look, _digest(look))
        arrays = (np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(batch))
        return [_HEADER.pack(number, digest), *(array.reshape(-1).view(np.uint8).data for array in arrays)]


class Receiver:
    """Reads messages. `batches`: one of each form that may come, those of the warm-up."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._forms: dict[bytes, Any] = {_digest(look_of(batch)): jax.tree.flatten(batch) for batch in batches}

    def from_bytes(self, message: bytes) -> tuple[int, Batch]:
        """Returns the number and the batch of a message of `Sender.to_bytes`.

        Raises:
            WireError: it is malformed, or of no known form.
        """
        if len(message) < _HEADER.size:
            raise WireError("no header")
        number, digest = _HEADER.unpack_from(message)
        if digest not in self._forms:
            raise WireError("there is no program for it")
        leaves, structure = self._forms[digest]
        if len(message) != (size := _HEADER.size + sum(leaf.nbytes for leaf in leaves)):
            raise WireError(f"{len(message)} bytes, expected {size}")
        arrays, at = [], _HEADER.size
        for leaf in leaves:
            array = np.frombuffer(message, leaf.dtype, count=leaf.size, offset=at).reshape(leaf.shape)
            # A program for numbers is not the one for arrays without dimensions.
            arrays.append(array if isinstance(leaf, np.ndarray) else array[()])
            at += leaf.nbytes
        return number, jax.tree.unflatten(structure, arrays)


def _digest(look: Look) -> bytes:
    return hashlib.sha256(repr(look).encode()).digest()[:16]
