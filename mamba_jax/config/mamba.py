"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mamba_jax.config.declaration import ADDED_ONCE, WHOLE, MixerConfig, Placement
from mamba_jax.config.errors import ModelConfigError
from mamba_jax.config.recurrence import GroupedRecurrence


@dataclass(frozen=True)
class MambaConfig(GroupedRecurrence, MixerConfig):
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
    of_heads: ClassVar[str] = "Mamba heads"
    of_groups: ClassVar[str] = "Mamba groups"
    arrays: ClassVar[tuple[str, str, str]] = ("ssm", "conv_x", "conv_bc")
    erases: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check_sizes()
        low, high = self.dt_limit
        if not 0 <= low <= high:
            raise ModelConfigError(f"step sizes limited to {low}..{high}: expected 0 <= low <= high")

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
