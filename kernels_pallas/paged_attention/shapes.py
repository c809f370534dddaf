"""Workloads of attention: real models and odd ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention layer and its pages."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    latent: bool = False
    """A token has one entry, which is key and value at once."""

    @property
    def entries(self) -> int:
        """Of a token."""
        return 1 if self.latent else 2 * self.kv_heads

    def small(self) -> "Shape":
        """Returns the same page and kind of grouping, on sizes that a test can afford."""
        kv_heads = min(self.kv_heads, 3)
        repeats = min(self.q_heads // self.kv_heads, 3)
        return dataclasses.replace(self, q_heads=kv_heads * repeats, kv_heads=kv_heads, head_dim=min(self.head_dim, 24))


SHAPES = (
    Shape("nemotron-h-8b", q_heads=32, kv_heads=8, head_dim=128),
    Shape("nemotron-3-nano", q_heads=32, kv_heads=2, head_dim=128, page_size=64),
    Shape("bamba-9b", q_heads=32, kv_heads=8, head_dim=128, page_size=32),
    Shape("granite-4.0-h-small", q_heads=32, kv_heads=8, head_dim=128),
    Shape("kimi-linear-48b-a3b", q_heads=32, kv_heads=1, head_dim=576, latent=True),
    Shape("one kv head", q_heads=5, kv_heads=1, head_dim=24),
    Shape("a kv head for each query head", q_heads=3, kv_heads=3, head_dim=20, page_size=4),
)
