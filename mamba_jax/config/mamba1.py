"""The mixer of the first Mamba (Gu and Dao, "Mamba", 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    Placement,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
)
from mamba_jax.config.errors import ModelConfigError, positive

MAMBA1 = "S"
"""The mixer's letter in a pattern: S for selective scan."""


@dataclass(frozen=True)
class Mamba1Config(RecurrenceConfig):
    """A Mamba-1 mixer: each channel has a state of its own, and step sizes come from a projection of low rank."""

    channels: int
    """Of z, x and the output."""
    state_size: int
    """Numbers in the state of a channel."""
    dt_rank: int
    """Width of what step sizes are projected from."""
    conv_width: int
    conv_bias: bool = True
    bias: bool = False
    """Whether the input and output projections have biases."""
    norm_eps: float | None = None
    """RMS norms of B, C and what step sizes are projected from; None: without norms."""
    norm_weights: bool = False
    """Whether these norms have weights."""
    letter: str = MAMBA1

    def __post_init__(self) -> None:
        positive(self, "channels", "state_size", "dt_rank")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")

    @property
    def inner_size(self) -> int:
        return self.channels

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, with channels last (see `kernels_pallas.selective_scan`), and the window of inputs.

        The tail of the state: x, B and step sizes, as `kernels_pallas.selective_scan.selective_replay` takes them. They
        are about a tenth of a state of 16 numbers per channel.
        """
        channels, tail = self._channels(0), StateUnit.TAIL
        return (
            StateArray("selective", (self.state_size, self.channels), Role.ACCUMULATED, self._channels(1)),
            StateArray("conv_x", (self.conv_width - 1, self.channels), Role.WINDOW, self._channels(1)),
            StateArray("selective_x", (self.channels,), Role.ACTIVATION, channels, tail, of="selective"),
            StateArray("selective_b", (self.state_size,), Role.ACTIVATION, None, tail, of="selective"),
            StateArray("selective_dt", (self.channels,), Role.STEERING, channels, tail, of="selective"),
        )

    def parameters(self) -> Mapping[str, Placement]:
        found: dict[str, Placement] = {
            "in_proj.weight": self._channels(1, rank=3),
            "conv.weight": self._channels(0),
            "x_proj.weight": self._channels(1),
            "dt_proj.weight": self._channels(0),
            "dt_proj.bias": self._channels(0),
            "a_log": self._channels(0),
            "d": self._channels(0),
            "out_proj.weight": self._channels(1),
        }
        if self.conv_bias:
            found["conv.bias"] = self._channels(0)
        if self.bias:
            found |= {"in_proj.bias": self._channels(1), "out_proj.bias": ADDED_ONCE}
        if self.norm_weights:
            found |= dict.fromkeys(("dt_norm.weight", "b_norm.weight", "c_norm.weight"), WHOLE)
        return found

    def _channels(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.channels, "Mamba channels", rank=rank)
