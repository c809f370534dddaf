"""Workloads of the scan by the gated delta rule: real models and odd ones."""

import dataclasses

from kernels_pallas.ssd_scan import shapes as ssd_scan


@dataclasses.dataclass(frozen=True)
class Shape(ssd_scan.Shape):
    """One layer, and the tile it is scanned in."""

    by_channel: bool = False
    """Every channel of a key decays on its own."""


SHAPES = (
    Shape("qwen3-next-80b-a3b", heads=32, head_dim=128, groups=16, state=128),
    Shape("qwen3.5-27b", heads=48, head_dim=128, groups=16, state=128),
    Shape("qwen3.5-9b", heads=32, head_dim=128, groups=16, state=128, tile_size=64),
    Shape("olmo-hybrid-7b", heads=30, head_dim=192, groups=30, state=96),
    Shape("kimi-linear-48b-a3b", heads=32, head_dim=128, groups=32, state=128, by_channel=True),
    Shape("6 heads, 3 groups", heads=6, head_dim=24, groups=3, state=40, tile_size=32),
    Shape("6 heads, 3 groups, by channel", heads=6, head_dim=24, groups=3, state=40, tile_size=36, by_channel=True),
    Shape("4 groups of one head", heads=4, head_dim=24, groups=4, state=40, tile_size=96),
    Shape("one head", heads=1, head_dim=8, groups=1, state=16, tile_size=36),
)
