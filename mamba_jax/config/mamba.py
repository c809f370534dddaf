"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    MixerConfig,
    Placement,
    Role,
    StateArray,
    StateUnit,
    UnevenDivision,
)
from mamba_jax.config.errors import ModelConfigError, positive


@dataclass(frozen=True)
class MambaConfig(MixerConfig):
    """A Mamba2 mixer. The inner width is `num_heads * head_dim`."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Step sizes are clamped to it, after softplus."""
    norm: bool = True
    """Normalise the gated output; otherwise only gate it."""
    norm_before_gate: bool = False
    norm_eps: float = 1e-5
    input_multiplier: float = 1.0
    projection_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on the input projection's z, x, B, C and dt."""
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")
        if self.num_heads % self.num_groups:
            raise ModelConfigError(f"{self.num_heads} Mamba heads cannot be divided into {self.num_groups} groups")
        low, high = self.dt_limit
        if not 0 <= low <= high:
            raise ModelConfigError(f"step sizes limited to {low}..{high}: expected 0 <= low <= high")

    @property
    def inner_size(self) -> int:
        """Channels of z, of x and of the output."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of B, and of C."""
        return self.num_groups * self.state_size

    def state(self) -> tuple[StateArray, ...]:
        """Returns the recurrent state, and the windows of raw convolution inputs, oldest first: of x, and of B and C.

        The tail of the recurrent state: x, B and the step size, as `kernels_pallas.state_replay.Tail` has them.
        """
        window = self.conv_width - 1
        recurrent = (self.num_heads, self.head_dim, self.state_size)
        return (
            StateArray("ssm", recurrent, Role.ACCUMULATED, self._heads(0), replay_kernels=("tpu", "gpu", "cpu")),
            StateArray("conv_x", (window, self.inner_size), Role.WINDOW, self._heads(1)),
            StateArray("conv_bc", (window, 2 * self.group_size), Role.WINDOW, self._groups(1, parts=2)),
            StateArray("ssm_x", (self.inner_size,), Role.ACTIVATION, self._heads(0), StateUnit.TAIL, of="ssm"),
            # A device keeps the group that its heads need, though it has computed all.
            StateArray("ssm_b", (self.group_size,), Role.ACTIVATION, self._own_groups(), StateUnit.TAIL, of="ssm"),
            StateArray("ssm_dt", (self.num_heads,), Role.STEERING, self._heads(0), StateUnit.TAIL, of="ssm"),
        )

    def parameters(self) -> Mapping[str, Placement]:
        found: dict[str, Placement] = {
            "in_proj_zx.weight": self._heads(1, rank=3),
            "in_proj_bc.weight": self._groups(1, rank=3),
            "in_proj_dt.weight": self._heads(0),
            "conv_x.weight": self._heads(0),
            # Tiny: each device picks its own.
            "conv_bc.weight": WHOLE,
            "dt_bias": self._heads(0),
            "a_log": self._heads(0),
            "d": self._heads(0),
            "out_proj.weight": self._heads(1),
        }
        if self.in_bias:
            found |= {
                "in_proj_zx.bias": self._heads(1),
                "in_proj_bc.bias": self._groups(1),
                "in_proj_dt.bias": self._heads(0),
            }
        if self.conv_bias:
            found |= {"conv_x.bias": self._heads(0), "conv_bc.bias": WHOLE}
        if self.norm:
            found["norm.weight"] = self._heads(0)
        if self.out_bias:
            found["out_proj.bias"] = ADDED_ONCE
        return found

    def _heads(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.num_heads, "Mamba heads", rank=rank)

    def _own_groups(self) -> Division:
        return Division(0, self.num_groups, "Mamba groups", otherwise=UnevenDivision.REPEAT)

    def _groups(self, axis: int, *, parts: int = 1, rank: int = 2) -> Division:
        return Division(axis, self.num_groups, "Mamba groups", parts=parts, otherwise=UnevenDivision.SHARE, rank=rank)
