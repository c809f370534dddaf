"""Cutting heads into blocks for kernels: a block lies within one group, or is made of whole groups."""

import dataclasses

from jax import lax
from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class HeadBlocks:
    """Blocks of `heads` heads that touch `groups` groups each."""

    count: int
    heads: int
    groups: int
    repeats: int
    """Heads of a group, in the whole operation."""

    def heads_of(self, group: int) -> slice:
        """Returns a block's heads that belong to its group number `group`."""
        size = self.heads // self.groups
        return slice(group * size, (group + 1) * size)

    def first_group(self, block: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the first group of a block, inside of a kernel."""
        if self.heads >= self.repeats:
            return block * self.groups
        return lax.div(block, self.repeats // self.heads)  # `//` would query the TPU of this machine, if any

    def block_of_groups(self, block: Int[Array, ""]) -> Int[Array, ""]:
        """Returns the number of the block of groups, in an index map."""
        return block if self.heads >= self.repeats else self.first_group(block)


def head_blocks(heads: int, groups: int, *, most: int, multiple: int = 1, group_multiple: int = 1) -> HeadBlocks:
    """Returns the largest blocks of at most `most` heads, or else the smallest blocks that there can be.

    Unless one block has all heads, its heads are a multiple of `multiple`, and its groups of `group_multiple`: what a
    processor's tiling asks for.
    """
    repeats = heads // groups
    fitting = []
    for size in range(1, heads + 1):
        whole = size % repeats == 0
        if heads % size or not (whole or repeats % size == 0):
            continue
        touched = size // repeats if whole else 1
        if size == heads or (size % multiple == 0 and (touched % group_multiple == 0 or touched == groups)):
            fitting.append(HeadBlocks(heads // size, size, touched, repeats))
    small = [blocks for blocks in fitting if blocks.heads <= most]
    return small[-1] if small else fitting[0]


def power_of_two_in(n: int, most: int) -> int:
    """Returns the largest power of two that divides n and is at most `most`."""
    power = 1
    while power * 2 <= most and n % (power * 2) == 0:
        power *= 2
    return power
