"""The arrays of a step's batch as one array of 32-bit words, so that the host sends one array instead of a dozen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

_WORD = 4


@dataclass(frozen=True)
class Packing:
    """Where the arrays of a batch are in the words: each begins at a whole word, in the order of the tree's leaves."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype, int, int], ...]
    """Shape, dtype (int32 or bool), first word and the word after the last."""

    @classmethod
    def of(cls, batch: Any) -> Packing:
        """`batch` is a tree of arrays, or of anything that has a shape and a dtype."""
        found, structure = jax.tree.flatten(batch)
        leaves, at = [], 0
        for leaf in found:
            shape, dtype = tuple(np.shape(leaf)), np.dtype(leaf.dtype)
            end = at + -(-math.prod(shape) * dtype.itemsize // _WORD)
            leaves.append((shape, dtype, at, end))
            at = end
        return cls(structure, tuple(leaves))

    @property
    def size(self) -> int:
        """Words."""
        return self.leaves[-1][3] if self.leaves else 0

    def empty(self) -> Any:
        """Returns a batch of zeros whose arrays are views of one new array, so that `pack` copies nothing."""
        words = np.zeros(self.size, np.int32)
        arrays = [
            words[start:end].view(dtype)[: math.prod(shape)].reshape(shape) for shape, dtype, start, end in self.leaves
        ]
        return jax.tree.unflatten(self.structure, arrays)

    def unpack(self, words: Int32[Array, " words"]) -> Any:
        """Returns the batch, within a compiled program."""
        arrays = []
        for shape, dtype, start, end in self.leaves:
            part = words[start:end]
            if dtype == np.bool_:
                part = jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)[: math.prod(shape)] != 0
            arrays.append(part.reshape(shape))
        return jax.tree.unflatten(self.structure, arrays)


def pack(batch: Any) -> np.ndarray:
    """Returns the words of a batch on the host; not copied if `Packing.empty` made it."""
    leaves = jax.tree.leaves(batch)
    words = leaves[0].base
    if words is not None and all(leaf.base is words for leaf in leaves):
        return words
    packing = Packing.of(batch)
    words = np.zeros(packing.size, np.int32)
    for leaf, (shape, dtype, start, end) in zip(leaves, packing.leaves, strict=True):
        words[start:end].view(dtype)[: math.prod(shape)] = np.asarray(leaf).reshape(-1)
    return words
