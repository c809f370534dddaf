"""Mixers whose state belongs to channels: Mamba-1 (Gu and Dao, "Mamba", 2023), the recurrent block of Griffin (De et
al., "Griffin", 2024, section 2.4), and the gated short convolution of LFM2 (Liquid AI, 2025).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    ModelConfigError,
    Placement,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
    declared,
    positive,
    wide_enough,
)
from mamba_jax.config.feed_forward import known_activation

MAMBA1, RG_LRU, SHORT_CONV = "S", "R", "C"
"""Letters of mixers in a pattern: selective scan, real-gated linear recurrent unit, convolution."""


@dataclass(frozen=True)
class ChannelRecurrence(RecurrenceConfig):
    """A mixer with a convolution and, after it, a recurrence of channels or none."""

    channels: int
    """Of the recurrence's input and output."""
    conv_width: int
    of_channels: ClassVar[str]
    """How messages call what devices divide: channels, or heads of them."""

    def __post_init__(self) -> None:
        positive(self, "channels")
        wide_enough(self.conv_width)

    @property
    def inner_size(self) -> int:
        return self.channels

    @property
    def num_units(self) -> int:
        """Number of pieces that devices divide the channels into."""
        return self.channels

    def _channels(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.num_units, self.of_channels, rank=rank)

    def _window(self, name: str) -> StateArray:
        return StateArray(name, (self.conv_width - 1, self.channels), Role.WINDOW, self._channels(1))


@dataclass(frozen=True)
class Mamba1Config(ChannelRecurrence):
    """A Mamba-1 mixer: each channel has a state of its own, and step sizes come from a projection of low rank."""

    state_size: int
    """Numbers in the state of a channel."""
    dt_rank: int
    """Width of what step sizes are projected from."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the input and output projections have biases."""
    norm_eps: float | None = None
    """RMS norms of B, C and what step sizes are projected from; None: without norms."""
    norm_weights: bool = False
    """Whether these norms have weights."""
    letter: str = MAMBA1
    of_channels: ClassVar[str] = "Mamba channels"
    varying_bits_of_kernels: ClassVar[str] = "Mamba-1"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "state_size", "dt_rank")

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, with channels last (see `kernels_pallas.selective_scan`), and the window of inputs.

        The tail of the state: x, B and step sizes, as `kernels_pallas.selective_scan.selective_replay` takes them. They
        are about a tenth of a state of 16 numbers per channel.
        """
        channels, tail = self._channels(0), StateUnit.TAIL
        return (
            StateArray("selective", (self.state_size, self.channels), Role.ACCUMULATED, self._channels(1)),
            self._window("conv_x"),
            StateArray("selective_x", (self.channels,), Role.ACTIVATION, channels, tail, of="selective"),
            StateArray("selective_b", (self.state_size,), Role.ACTIVATION, None, tail, of="selective"),
            StateArray("selective_dt", (self.channels,), Role.GATE, channels, tail, of="selective"),
        )

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._channels(1, rank=3), "in_proj.weight"),
            (self._channels(0), "conv.weight dt_proj.weight dt_proj.bias a_log d"),
            (self._channels(1), "x_proj.weight out_proj.weight"),
            (self._channels(0), "conv.bias", self.conv_bias),
            (self._channels(1), "in_proj.bias", self.bias),
            (ADDED_ONCE, "out_proj.bias", self.bias),
            (WHOLE, "dt_norm.weight b_norm.weight c_norm.weight", self.norm_weights),
        )


@dataclass(frozen=True)
class RGLRUConfig(ChannelRecurrence):
    """A convolution and a real-gated linear recurrent unit, times a branch with an activation.

    The state of a channel is one number: a Mamba-1 state of that size.
    """

    num_heads: int
    """The matrices of the two gates have a block for each head."""
    activation: str
    letter: str = RG_LRU
    varying_bits: ClassVar[str] = "RG-LRU recurrence"
    of_channels: ClassVar[str] = "RG-LRU heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "num_heads")
        known_activation(self.activation)
        if self.channels % self.num_heads:
            raise ModelConfigError(f"{self.channels} channels do not divide into {self.num_heads} heads")

    @property
    def num_units(self) -> int:
        return self.num_heads

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, as `kernels_pallas.selective_scan` has it, and the window of inputs.

        There is no tail: the inputs of a token are larger than a state.
        """
        return (
            StateArray("selective", (1, self.channels), Role.ACCUMULATED, self._channels(1)),
            self._window("conv_x"),
        )

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._channels(0), "x_proj.weight x_proj.bias y_proj.weight y_proj.bias conv.weight conv.bias"),
            (self._channels(0, rank=3), "input_gate.weight recurrent_gate.weight"),
            (self._channels(0), "input_gate_bias recurrent_gate_bias recurrent_param"),
            (self._channels(1), "out_proj.weight"),
            (ADDED_ONCE, "out_proj.bias"),
        )


@dataclass(frozen=True)
class ShortConvConfig(ChannelRecurrence):
    """A causal convolution over a few tokens, gated before and after. Its state is the last `conv_width - 1` inputs."""

    bias: bool = False
    """Of the projections and the convolution."""
    letter: str = SHORT_CONV
    of_channels: ClassVar[str] = "convolution channels"

    def state(self) -> tuple[StateArray, ...]:
        """Returns the window of gated inputs, oldest first."""
        return (self._window("conv"),)

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._channels(1, rank=3), "in_proj.weight"),
            (self._channels(0), "conv.weight"),
            (self._channels(1), "out_proj.weight"),
            (self._channels(1), "in_proj.bias", self.bias),
            (self._channels(0), "conv.bias", self.bias),
            (ADDED_ONCE, "out_proj.bias", self.bias),
        )
