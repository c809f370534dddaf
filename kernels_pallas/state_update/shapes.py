"""Workloads of the state update: real models and odd ones, with and without drafts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One Mamba layer, rows of a decode step and steps per row (1 + drafts)."""

    name: str
    rows: int
    steps: int
    heads: int
    head_dim: int
    groups: int
    state: int

    def small(self) -> "Shape":
        """Returns the same rows and steps and kind of grouping, on sizes that a test can afford."""
        repeats = min(self.heads // self.groups, 3)
        groups = min(self.groups, 4)
        return dataclasses.replace(
            self,
            rows=min(self.rows, 12),
            heads=groups * repeats,
            groups=groups,
            head_dim=min(self.head_dim, 24),
            state=min(self.state, 40),
        )


SHAPES = (
    Shape("nemotron-h-8b, 1 row", 1, 1, heads=128, head_dim=64, groups=8, state=128),
    Shape("nemotron-h-8b, 32 rows, 3 drafts", 32, 4, heads=128, head_dim=64, groups=8, state=128),
    Shape("nemotron-3-nano, 128 rows", 128, 1, heads=64, head_dim=64, groups=8, state=128),
    Shape("bamba-9b, 8 rows", 8, 1, heads=128, head_dim=64, groups=1, state=128),
    Shape("granite-4.0-h-small, 4 rows, 2 drafts", 4, 3, heads=128, head_dim=64, groups=1, state=128),
    Shape("9 heads, 3 groups", 5, 2, heads=9, head_dim=24, groups=3, state=40),
    Shape("4 groups of one head", 3, 1, heads=4, head_dim=24, groups=4, state=40),
    Shape("one head", 2, 1, heads=1, head_dim=8, groups=1, state=16),
)
