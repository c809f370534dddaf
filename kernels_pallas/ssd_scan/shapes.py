"""Workloads of the scan: real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One Mamba layer and the tile it is scanned in."""

    name: str
    heads: int
    head_dim: int
    groups: int
    state: int
    tile_size: int = 128

    def small(self) -> "Shape":
        """Returns the same tile and kind of grouping, on sizes that a test can afford."""
        repeats = min(self.heads // self.groups, 3)
        groups = min(self.groups, 4)
        return dataclasses.replace(
            self, heads=groups * repeats, groups=groups, head_dim=min(self.head_dim, 24), state=min(self.state, 40)
        )


SHAPES = (
    Shape("nemotron-h-8b", heads=128, head_dim=64, groups=8, state=128),
    Shape("nemotron-nano-9b-v2", heads=128, head_dim=80, groups=8, state=128),
    Shape("nemotron-3-nano", heads=64, head_dim=64, groups=8, state=128),
    Shape("bamba-9b", heads=128, head_dim=64, groups=1, state=128, tile_size=256),
    Shape("granite-4.0-h-small", heads=128, head_dim=64, groups=1, state=128, tile_size=256),
    Shape("9 heads, 3 groups", heads=9, head_dim=24, groups=3, state=40, tile_size=32),
    Shape("4 groups of one head", heads=4, head_dim=24, groups=4, state=40, tile_size=64),
    Shape("one head", heads=1, head_dim=8, groups=1, state=16, tile_size=36),
)
