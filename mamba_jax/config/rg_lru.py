"""The recurrent block of Griffin (De et al., "Griffin", 2024, section 2.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mamba_jax.config.declaration import ADDED_ONCE, Division, Placement, RecurrenceConfig, Role, StateArray
from mamba_jax.config.errors import ModelConfigError, positive
from mamba_jax.config.feed_forward import known_activation

RG_LRU = "R"
"""The mixer's letter in a pattern."""


@dataclass(frozen=True)
class RGLRUConfig(RecurrenceConfig):
    """A convolution and a real-gated linear recurrent unit, times a branch with an activation.

    The state of a channel is one number: a Mamba-1 state of that size.
    """

    channels: int
    num_heads: int
    """The matrices of the two gates have a block for each head."""
    conv_width: int
    activation: str
    letter: str = RG_LRU
    varying_bits: ClassVar[str] = "RG-LRU recurrence"

    def __post_init__(self) -> None:
        positive(self, "channels", "num_heads")
        known_activation(self.activation)
        if self.channels % self.num_heads:
            raise ModelConfigError(f"{self.channels} channels do not divide into {self.num_heads} heads")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")

    @property
    def inner_size(self) -> int:
        return self.channels

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, as `kernels_pallas.selective_scan` has it, and the window of inputs.

        There is no tail: the inputs of a token are larger than a state.
        """
        return (
            StateArray("selective", (1, self.channels), Role.ACCUMULATED, self._heads(1)),
            StateArray("conv_x", (self.conv_width - 1, self.channels), Role.WINDOW, self._heads(1)),
        )

    def parameters(self) -> Mapping[str, Placement]:
        both = ("x_proj", "y_proj", "conv")
        found: dict[str, Placement] = {f"{one}.{part}": self._heads(0) for one in both for part in ("weight", "bias")}
        for gate in ("input_gate", "recurrent_gate"):
            found |= {f"{gate}.weight": self._heads(0, rank=3), f"{gate}_bias": self._heads(0)}
        return found | {
            "recurrent_param": self._heads(0),
            "out_proj.weight": self._heads(1),
            "out_proj.bias": ADDED_ONCE,
        }

    def _heads(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.num_heads, "RG-LRU heads", rank=rank)
