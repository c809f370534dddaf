"""Workloads of the replay: real models and odd ones, with and without drafts."""

import dataclasses

from kernels_pallas.state_update.shapes import Shape as UpdateShape


@dataclasses.dataclass(frozen=True)
class Shape(UpdateShape):
    """One Mamba layer, rows of a decode step, steps per row (1 + drafts) and tokens between states."""

    interval: int

    @property
    def entries(self) -> int:
        """Entries of a tail: the next power of two of the tokens that it can have."""
        return 1 << (self.interval + self.steps - 2).bit_length()


SHAPES = (
    Shape("nemotron-h-8b, 1 row", 1, 1, heads=128, head_dim=64, groups=8, state=128, interval=16),
    Shape("nemotron-h-8b, 32 rows, 3 drafts", 32, 4, heads=128, head_dim=64, groups=8, state=128, interval=16),
    Shape("nemotron-3-nano, 128 rows", 128, 1, heads=64, head_dim=64, groups=8, state=128, interval=32),
    Shape("bamba-9b, 8 rows", 8, 1, heads=128, head_dim=64, groups=1, state=128, interval=16),
    Shape("granite-4.0-h-small, 4 rows, 2 drafts", 4, 3, heads=128, head_dim=64, groups=1, state=128, interval=8),
    Shape("9 heads, 3 groups", 5, 2, heads=9, head_dim=24, groups=3, state=40, interval=8),
    Shape("4 groups of one head", 3, 1, heads=4, head_dim=24, groups=4, state=40, interval=4),
    Shape("one head", 2, 1, heads=1, head_dim=8, groups=1, state=16, interval=8),
)
