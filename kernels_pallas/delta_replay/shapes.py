"""Workloads of the delta rule's replay: real models and odd ones, with and without drafts."""

import dataclasses

from kernels_pallas.state_replay import shapes as state_replay


@dataclasses.dataclass(frozen=True)
class Shape(state_replay.Shape):
    """One layer, rows of a decode step, steps per row and tokens between states."""

    by_channel: bool = False
    """Every channel of a key decays on its own."""


SHAPES = (
    Shape("qwen3-next-80b-a3b, 1 row", 1, 1, heads=32, head_dim=128, groups=16, state=128, interval=16),
    Shape("qwen3-next-80b-a3b, 32 rows, 3 drafts", 32, 4, heads=32, head_dim=128, groups=16, state=128, interval=16),
    Shape("qwen3.5-27b, 8 rows", 8, 1, heads=48, head_dim=128, groups=16, state=128, interval=32),
    Shape("olmo-hybrid-7b, 4 rows, 2 drafts", 4, 3, heads=30, head_dim=192, groups=30, state=96, interval=8),
    Shape(
        "kimi-linear-48b-a3b, 3 drafts",
        8,
        4,
        heads=32,
        head_dim=128,
        groups=32,
        state=128,
        interval=16,
        by_channel=True,
    ),
    Shape("6 heads, 3 groups", 5, 2, heads=6, head_dim=24, groups=3, state=40, interval=8),
    Shape("6 heads, 3 groups, by channel", 5, 2, heads=6, head_dim=24, groups=3, state=40, interval=8, by_channel=True),
    Shape("one head", 2, 1, heads=1, head_dim=8, groups=1, state=16, interval=8),
    Shape("one head, by channel", 2, 3, heads=1, head_dim=8, groups=1, state=16, interval=8, by_channel=True),
)
