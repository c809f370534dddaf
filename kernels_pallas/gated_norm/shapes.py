"""Workloads of the gated norm: real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One norm."""

    name: str
    channels: int
    groups: int

    def small(self) -> "Shape":
        """Returns the same groups, on sizes that a test can afford."""
        return dataclasses.replace(self, channels=self.groups * min(self.channels // self.groups, 48))


SHAPES = (
    Shape("nemotron-h-8b", channels=8192, groups=8),
    Shape("nemotron-3-nano", channels=4096, groups=8),
    Shape("bamba-9b", channels=8192, groups=1),
    Shape("granite-4.0-h-small", channels=8192, groups=1),
    Shape("3 groups of 72", channels=216, groups=3),
    Shape("groups of one", channels=7, groups=7),
)
