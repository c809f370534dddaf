"""Workloads of the delta update: real models and odd ones, with and without drafts."""

import dataclasses

from kernels_pallas.state_update import shapes as state_update


@dataclasses.dataclass(frozen=True)
class Shape(state_update.Shape):
    """One layer, rows of a decode step and steps per row."""

    by_channel: bool = False
    """Every channel of a key decays on its own."""


SHAPES = (
    Shape("qwen3-next-80b-a3b, 1 row", 1, 1, heads=32, head_dim=128, groups=16, state=128),
    Shape("qwen3-next-80b-a3b, 32 rows, 3 drafts", 32, 4, heads=32, head_dim=128, groups=16, state=128),
    Shape("qwen3.5-27b, 8 rows", 8, 1, heads=48, head_dim=128, groups=16, state=128),
    Shape("olmo-hybrid-7b, 4 rows, 2 drafts", 4, 3, heads=30, head_dim=192, groups=30, state=96),
    Shape("kimi-linear-48b-a3b, 8 rows, 3 drafts", 8, 4, heads=32, head_dim=128, groups=32, state=128, by_channel=True),
    Shape("6 heads, 3 groups", 5, 2, heads=6, head_dim=24, groups=3, state=40),
    Shape("6 heads, 3 groups, by channel", 5, 2, heads=6, head_dim=24, groups=3, state=40, by_channel=True),
    Shape("4 groups of one head", 3, 1, heads=4, head_dim=24, groups=4, state=40),
    Shape("one head", 2, 1, heads=1, head_dim=8, groups=1, state=16),
)
