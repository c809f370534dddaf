"""Workloads of the selective scan: real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One Mamba layer, the tile that it is scanned in, the rows and steps of a decode step, and the interval of its
    replay."""

    name: str
    inner: int
    state: int
    tile_size: int = 128
    rows: int = 1
    steps: int = 1
    interval: int = 8

    @property
    def entries(self) -> int:
        """Entries of a tail: the next power of two of the tokens that it can have."""
        return 1 << (self.interval + self.steps - 2).bit_length()

    def small(self) -> "Shape":
        """Returns the same tile, rows and steps, on sizes that a test can afford."""
        return dataclasses.replace(self, inner=min(self.inner, 40), rows=min(self.rows, 12))


SHAPES = (
    Shape("falcon-mamba-7b", inner=8192, state=16, rows=32, steps=4),
    Shape("mamba-2.8b", inner=5120, state=16),
    Shape("jamba-1.5-mini", inner=8192, state=16, rows=128),
    Shape("27 channels, states of 5", inner=27, state=5, tile_size=36, rows=5, steps=2),
    Shape("one channel", inner=1, state=3, tile_size=32, rows=2),
)
