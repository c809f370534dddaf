"""The mixer of gated delta nets (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024).

Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025) is the same, but that every channel of a key decays on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mamba_jax.config.declaration import WHOLE, Placement, RecurrenceConfig
from mamba_jax.config.errors import ModelConfigError
from mamba_jax.config.recurrence import GroupedRecurrence

DELTA = "D"
"""The mixer's letter in a pattern."""


@dataclass(frozen=True)
class DeltaConfig(GroupedRecurrence, RecurrenceConfig):
    """A gated delta net: value heads in groups, each group with the key (and query) head that its value heads share."""

    num_heads: int
    """Of values."""
    head_dim: int
    """Of a value."""
    state_size: int
    """Of a key."""
    num_groups: int
    """Heads of keys."""
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
    """Writing strengths lie between 0 and this; above 1, states may have negative eigenvalues."""
    decay: Literal["head", "channel"] = "head"
    """The unit with its own decay: a value head, or each channel of its keys."""
    log_decay_bound: float | None = None
    """If given, log decays are log_decay_bound * sigmoid(exp(a_log) * (a + dt_bias)), between the bound and 0, not
    -exp(a_log) * softplus(a + dt_bias)."""
    gate_rank: int = 0
    """Channels between the two matrices that compute the decays and the output's gate; 0: one matrix computes them."""
    output_gate: Literal["silu", "sigmoid"] = "silu"
    letter: str = DELTA
    of_heads: ClassVar[str] = "value heads"
    of_groups: ClassVar[str] = "key heads"
    arrays: ClassVar[tuple[str, str, str]] = ("delta", "conv_v", "conv_qk")
    erases: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.log_decay_bound is not None and not self.log_decay_bound < 0:
            raise ModelConfigError(f"log_decay_bound is {self.log_decay_bound}: a negative number is expected")

    @property
    def num_decays(self) -> int:
        """Of a token."""
        return self.num_heads * (self.state_size if self.decay == "channel" else 1)

    def parameters(self) -> Mapping[str, Placement]:
        by_heads, by_groups = self._heads(0), self._groups(0)
        found: dict[str, Placement] = {
            "q_proj.weight": by_groups,
            "k_proj.weight": by_groups,
            "v_proj.weight": by_heads,
            "b_proj.weight": by_heads,
            "conv_v.weight": by_heads,
            # Tiny: each device picks its own.
            "conv_qk.weight": WHOLE,
            "dt_bias": by_heads,
            "a_log": by_heads,
            "norm.weight": WHOLE,
            "out_proj.weight": self._heads(1),
        }
        for gate in ("z_proj", "a_proj"):
            if self.gate_rank:
                found |= {f"{gate}.down.weight": WHOLE, f"{gate}.up.weight": by_heads}
            else:
                found[f"{gate}.weight"] = by_heads
        return found
