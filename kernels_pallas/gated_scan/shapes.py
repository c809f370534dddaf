"""Workloads: real models and odd ones."""

import dataclasses

from kernels_pallas.ssd_scan import shapes as ssd_scan


@dataclasses.dataclass(frozen=True)
class Shape(ssd_scan.Shape):
    """One layer, and the tile it is scanned in."""

    width: int = 4
    bias: bool = True
    norm: bool = True
    norm_before_gate: bool = False

    def small(self) -> "Shape":
        """Returns the same kind of grouping, with blocks of 128 channels, on sizes that a test can afford."""
        repeats = min(self.heads // self.groups, 4)
        groups = min(self.groups, 2)
        return dataclasses.replace(
            self, heads=groups * repeats, groups=groups, head_dim=32, state=min(self.state, 16), tile_size=16
        )


SHAPES = (
    Shape("nemotron-h-8b", heads=128, head_dim=64, groups=8, state=128),
    Shape("bamba-9b", heads=128, head_dim=64, groups=1, state=128, tile_size=256),
    Shape("falcon-h1-7b", heads=24, head_dim=128, groups=1, state=256, norm=False),
    Shape("mamba2-2.7b", heads=80, head_dim=64, groups=1, state=128),
    Shape("norm before the gate", heads=8, head_dim=32, groups=2, state=16, width=2, bias=False, norm_before_gate=True),
)
