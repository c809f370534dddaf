"""Workloads of the convolution: real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One convolution and the tile it is cut into."""

    name: str
    channels: int
    width: int = 4
    bias: bool = True
    tile_size: int = 128

    def small(self) -> "Shape":
        """Returns the same window, on sizes that a test can afford."""
        return dataclasses.replace(self, channels=min(self.channels, 40), tile_size=min(self.tile_size, 32))


SHAPES = (
    Shape("nemotron-h-8b, x", channels=8192),
    Shape("nemotron-h-8b, b and c", channels=2048),
    Shape("nemotron-3-nano, x", channels=4096),
    Shape("bamba-9b, b and c", channels=256, tile_size=256),
    Shape("granite-4.0-h-small, x", channels=8192, tile_size=256),
    Shape("width 2, no bias", channels=216, width=2, bias=False, tile_size=4),
    Shape("width 3", channels=9, width=3, tile_size=8),
    Shape("tile shorter than the window", channels=24, width=6, tile_size=2),
)
