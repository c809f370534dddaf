"""The gated short convolution of LFM2 (Liquid AI, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mamba_jax.config.declaration import ADDED_ONCE, Division, Placement, RecurrenceConfig, Role, StateArray
from mamba_jax.config.errors import ModelConfigError, positive

SHORT_CONV = "C"
"""The mixer's letter in a pattern."""


@dataclass(frozen=True)
class ShortConvConfig(RecurrenceConfig):
    """A causal convolution over a few tokens, gated before and after. Its state is the last `conv_width - 1` inputs."""

    channels: int
    conv_width: int
    bias: bool = False
    """Of the projections and the convolution."""
    letter: str = SHORT_CONV

    def __post_init__(self) -> None:
        positive(self, "channels")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")

    @property
    def inner_size(self) -> int:
        return self.channels

    def state(self) -> tuple[StateArray, ...]:
        """Returns the window of gated inputs, oldest first."""
        return (StateArray("conv", (self.conv_width - 1, self.channels), Role.WINDOW, self._channels(1)),)

    def parameters(self) -> Mapping[str, Placement]:
        found: dict[str, Placement] = {
            "in_proj.weight": self._channels(1, rank=3),
            "conv.weight": self._channels(0),
            "out_proj.weight": self._channels(1),
        }
        if self.bias:
            found |= {"in_proj.bias": self._channels(1), "conv.bias": self._channels(0), "out_proj.bias": ADDED_ONCE}
        return found

    def _channels(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.channels, "convolution channels", rank=rank)
