"""Workloads of the operations: layers of real models and odd ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, Self


class Shape:
    """The sizes of a layer's operation."""

    MOST: ClassVar[Mapping[str, int]] = {}

    def small(self) -> Self:
        """Returns the same kind of sizes, none above `MOST`, which a test can afford."""
        return dataclasses.replace(self, **{name: min(getattr(self, name), most) for name, most in self.MOST.items()})


class Decoded(Shape):
    """A recurrence whose tails are rings."""

    @property
    def entries(self) -> int:
        """Entries of a tail: the next power of two of the tokens that it can have."""
        return 1 << (self.interval + self.steps - 2).bit_length()


@dataclasses.dataclass(frozen=True)
class Recurrence(Decoded):
    """A layer of a recurrence with heads: tiles of its scan; rows, steps (1 + drafts) and interval of its decode."""

    name: str
    heads: int
    head_dim: int
    groups: int
    state: int
    tile_size: int = 128
    rows: int = 1
    steps: int = 1
    interval: int = 16
    tiles: int = 4
    by_channel: bool = False
    """Every channel of a key has its own decay."""
    erase: bool = False
    """The recurrence erases: the delta rule."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one slot."""
        return self.heads, self.head_dim, self.state

    def divided(self, devices: int) -> Self:
        """Returns the part of one of several devices: some heads, and the groups that they need."""
        name, groups = f"{self.name}/{devices}", max(1, self.groups // devices)
        return dataclasses.replace(self, name=name, heads=self.heads // devices, groups=groups)

    def small(self) -> Recurrence:
        """Returns the same tile, rows, steps and kind of grouping, on sizes that a test can afford."""
        repeats, groups = min(self.heads // self.groups, 3), min(self.groups, 4)
        return dataclasses.replace(
            self, rows=min(self.rows, 12), heads=groups * repeats, groups=groups, head_dim=min(self.head_dim, 24),
            state=min(self.state, 40),
        )  # fmt: skip


MAMBA2 = (
    Recurrence("nemotron-h-8b", 128, 64, 8, 128),
    Recurrence("nemotron-nano-9b-v2", 128, 80, 8, 128, rows=32, steps=4),
    Recurrence("nemotron-3-nano", 64, 64, 8, 128, rows=128, interval=32),
    Recurrence("bamba-9b", 128, 64, 1, 128, tile_size=256, rows=8),
    Recurrence("granite-4.0-h-small", 128, 64, 1, 128, tile_size=256, rows=4, steps=3, interval=8),
    Recurrence("9 heads, 3 groups", 9, 24, 3, 40, tile_size=32, rows=5, steps=2, interval=8),
    Recurrence("4 groups of one head", 4, 24, 4, 40, tile_size=64, rows=3, interval=4),
    Recurrence("one head", 1, 8, 1, 16, tile_size=36, rows=2, interval=8),
)

Delta = functools.partial(Recurrence, erase=True)
DELTA = (
    Delta("qwen3-next-80b-a3b", 32, 128, 16, 128),
    Delta("qwen3.5-27b", 48, 128, 16, 128, rows=8, interval=32),
    Delta("qwen3.5-9b", 32, 128, 16, 128, tile_size=64, rows=32, steps=4),
    Delta("olmo-hybrid-7b", 30, 192, 30, 96, rows=4, steps=3, interval=8),
    Delta("kimi-linear-48b-a3b", 32, 128, 32, 128, rows=8, steps=4, by_channel=True),
    Delta("6 heads, 3 groups", 6, 24, 3, 40, tile_size=32, rows=5, steps=2, interval=8),
    Delta("6 heads, 3 groups, by channel", 6, 24, 3, 40, 36, rows=5, steps=2, interval=8, by_channel=True),
    Delta("4 groups of one key head", 4, 24, 4, 40, tile_size=96, rows=3, interval=4),
    Delta("one key head, by channel", 1, 8, 1, 16, tile_size=36, rows=2, steps=3, interval=8, by_channel=True),
    Delta("one key head", 1, 8, 1, 16, tile_size=36, rows=2, interval=8),
)


@dataclasses.dataclass(frozen=True)
class GatedRecurrence(Recurrence):
    """A layer with the convolution before its scan, and the gate and norm after it."""

    width: int = 4
    bias: bool = True
    norm: bool = True
    norm_before_gate: bool = False

    def small(self) -> GatedRecurrence:
        """Returns the same kind of grouping, with blocks of 128 channels, on sizes that a test can afford."""
        repeats, groups = min(self.heads // self.groups, 4), min(self.groups, 2)
        return dataclasses.replace(
            self, heads=groups * repeats, groups=groups, head_dim=32, state=min(self.state, 16), tile_size=16
        )


GATED = (
    GatedRecurrence("nemotron-h-8b", 128, 64, 8, 128),
    GatedRecurrence("bamba-9b", 128, 64, 1, 128, tile_size=256),
    GatedRecurrence("falcon-h1-7b", 24, 128, 1, 256, norm=False),
    GatedRecurrence("norm before the gate", 8, 32, 2, 16, width=2, bias=False, norm_before_gate=True),
)


@dataclasses.dataclass(frozen=True)
class Selective(Decoded):
    """A layer of the first Mamba: tiles of its scan; rows, steps (1 + drafts) and interval of its decode."""

    MOST: ClassVar = {"inner": 40, "rows": 12}
    name: str
    inner: int
    state: int
    tile_size: int = 128
    rows: int = 1
    steps: int = 1
    interval: int = 8
    tiles: int = 4

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of one slot."""
        return self.state, self.inner


SELECTIVE = (
    Selective("falcon-mamba-7b", inner=8192, state=16, rows=32, steps=4),
    Selective("mamba-2.8b", inner=5120, state=16),
    Selective("27 channels, states of 5", inner=27, state=5, tile_size=36, rows=5, steps=2),
    Selective("one channel", inner=1, state=3, tile_size=32, rows=2),
)


@dataclasses.dataclass(frozen=True)
class Convolution(Shape):
    """A convolution, and the tile that its input is divided into."""

    MOST: ClassVar = {"channels": 40, "tile_size": 32}
    name: str
    channels: int
    width: int = 4
    bias: bool = True
    tile_size: int = 128


CONVOLUTIONS = (
    Convolution("nemotron-h-8b, x", channels=8192),
    Convolution("width 2, no bias", channels=216, width=2, bias=False, tile_size=4),
    Convolution("width 3", channels=9, width=3, tile_size=8),
    Convolution("tile shorter than the window", channels=24, width=6, tile_size=2),
)


@dataclasses.dataclass(frozen=True)
class Norm(Shape):
    """A gated norm."""

    name: str
    channels: int
    groups: int

    def small(self) -> Norm:
        """Returns the same groups, on sizes that a test can afford."""
        return dataclasses.replace(self, channels=self.groups * min(self.channels // self.groups, 48))


NORMS = (
    Norm("nemotron-h-8b", channels=8192, groups=8),
    Norm("bamba-9b", channels=8192, groups=1),
    Norm("3 groups of 72", channels=216, groups=3),
    Norm("groups of one", channels=7, groups=7),
)


@dataclasses.dataclass(frozen=True)
class Product(Shape):
    """A product of rows [rows, inputs] with a matrix [outputs, inputs]."""

    MOST: ClassVar = {"inputs": 96, "outputs": 120}
    name: str
    rows: int
    inputs: int
    outputs: int


PRODUCTS = (
    Product("nemotron-h-8b up, 1 row", 1, 4096, 21504),
    Product("nemotron-h-8b up, 1 + 3 drafts", 4, 4096, 21504),
    Product("granite-4.0-h-small in, 128 rows", 128, 4096, 16768),
    Product("nemotron-3-nano in, 512 tokens", 512, 2688, 10304),
    Product("odd", 5, 77, 131),
    Product("no rows", 0, 64, 64),
)


@dataclasses.dataclass(frozen=True)
class GroupedProduct(Shape):
    """A product with one matrix per expert; `tokens` counts each token once for each of its experts."""

    MOST: ClassVar = {"tokens": 300, "experts": 24, "inputs": 48, "outputs": 40}
    name: str
    tokens: int
    experts: int
    inputs: int
    outputs: int


GROUPED_PRODUCTS = (
    GroupedProduct("nemotron-3-nano up, 1 row", 6, 128, 2688, 1856),
    GroupedProduct("nemotron-3-nano down, 32 rows", 192, 128, 1856, 2688),
    GroupedProduct("nemotron-3-nano up, 512 tokens", 3072, 128, 2688, 1856),
    GroupedProduct("one expert", 33, 1, 24, 40),
    GroupedProduct("odd", 77, 5, 9, 13),
)


@dataclasses.dataclass(frozen=True)
class ExpertMLP(Shape):
    """The MLPs of a layer of experts."""

    MOST: ClassVar = {"tokens": 4, "experts": 24, "chosen": 2, "inputs": 48, "size": 32}
    name: str
    tokens: int
    experts: int
    chosen: int
    inputs: int
    size: int
    gated: bool = True


EXPERT_MLPS = (
    ExpertMLP("nemotron-3-nano, 1 row", 1, 128, 6, 2688, 1856, gated=False),
    ExpertMLP("nemotron-3-nano, 8 rows", 8, 128, 6, 2688, 1856, gated=False),
    ExpertMLP("nemotron-3-nano, 32 rows", 32, 128, 6, 2688, 1856, gated=False),
    ExpertMLP("nemotron-3-super, 8 rows", 8, 512, 22, 1024, 2688, gated=False),
    ExpertMLP("qwen3-next-80b-a3b, 8 rows", 8, 512, 10, 2048, 512),
    ExpertMLP("qwen3-next-80b-a3b, 32 rows", 32, 512, 10, 2048, 512),
    ExpertMLP("kimi-linear-48b-a3b, 8 rows", 8, 256, 8, 2304, 1024),
    ExpertMLP("granite-4.0-h-small, 8 rows", 8, 72, 10, 4096, 768),
)


@dataclasses.dataclass(frozen=True)
class Attention(Shape):
    """An attention layer and its pages."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    latent: bool = False
    """A token has one entry, which is key and value at once."""
    rows: int = 8
    q_len: int = 1
    """Queries of a block."""
    context: int = 1024
    """Tokens of each row."""
    blocks_of_row: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of queries of all rows."""
        return self.rows * self.blocks_of_row

    @property
    def entries(self) -> int:
        """Entries of a token in the cache."""
        return 1 if self.latent else 2 * self.kv_heads

    def small(self) -> Attention:
        """Returns the same page and kind of grouping, on sizes that a test can afford."""
        kv_heads, repeats = min(self.kv_heads, 3), min(self.q_heads // self.kv_heads, 3)
        return dataclasses.replace(self, q_heads=kv_heads * repeats, kv_heads=kv_heads, head_dim=min(self.head_dim, 24))


ATTENTION = (
    Attention("nemotron-h-8b", q_heads=32, kv_heads=8, head_dim=128),
    Attention("nemotron-3-nano", q_heads=32, kv_heads=2, head_dim=128, page_size=64),
    Attention("bamba-9b", q_heads=32, kv_heads=8, head_dim=128, page_size=32),
    Attention("kimi-linear-48b-a3b", q_heads=32, kv_heads=1, head_dim=576, latent=True),
    Attention("one kv head", q_heads=5, kv_heads=1, head_dim=24),
    Attention("a kv head for each query head", q_heads=3, kv_heads=3, head_dim=20, page_size=4),
)
