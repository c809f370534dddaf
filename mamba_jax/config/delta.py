"""The mixer of gated delta nets (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024).

Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025) is the same, but that every channel of a key decays on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mamba_jax.config.declaration import (
    WHOLE,
    Division,
    Placement,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
    UnevenDivision,
)
from mamba_jax.config.errors import ModelConfigError, positive

DELTA = "D"
"""The mixer's letter in a pattern."""


@dataclass(frozen=True)
class DeltaConfig(RecurrenceConfig):
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

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        if self.conv_width < 2:
            raise ModelConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")
        if self.log_decay_bound is not None and not self.log_decay_bound < 0:
            raise ModelConfigError(f"log_decay_bound is {self.log_decay_bound}: a negative number is expected")
        if self.num_heads % self.num_groups:
            raise ModelConfigError(f"{self.num_heads} value heads cannot share {self.num_groups} key heads")

    @property
    def inner_size(self) -> int:
        """Channels of the values, of the gate and of the output."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of the keys, and of the queries."""
        return self.num_groups * self.state_size

    @property
    def num_decays(self) -> int:
        """Of a token."""
        return self.num_heads * (self.state_size if self.decay == "channel" else 1)

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, and windows of raw convolution inputs, oldest first: of values; of queries and keys.

        The tail of the recurrent state: what tokens added, by which key, and the decay, as
        `kernels_pallas.delta_replay.DeltaTail` has them. Decays by channel take as much of it as keys in float32.
        """
        window = self.conv_width - 1
        recurrent = (self.num_heads, self.head_dim, self.state_size)
        return (
            StateArray("delta", recurrent, Role.ACCUMULATED, self._heads(0), replay_kernels=("tpu", "gpu")),
            StateArray("conv_v", (window, self.inner_size), Role.WINDOW, self._heads(1)),
            StateArray("conv_qk", (window, 2 * self.key_size), Role.WINDOW, self._groups(1, parts=2)),
            StateArray("delta_u", (self.inner_size,), Role.STEERING, self._heads(0), StateUnit.TAIL, of="delta"),
            # A device keeps the keys that its heads need, though it has computed all.
            StateArray("delta_k", (self.key_size,), Role.ACTIVATION, self._own_groups(), StateUnit.TAIL, of="delta"),
            StateArray("delta_decay", (self.num_decays,), Role.STEERING, self._heads(0), StateUnit.TAIL, of="delta"),
        )

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

    def _heads(self, axis: int) -> Division:
        return Division(axis, self.num_heads, "value heads")

    def _own_groups(self) -> Division:
        return Division(0, self.num_groups, "key heads", otherwise=UnevenDivision.REPEAT)

    def _groups(self, axis: int, *, parts: int = 1) -> Division:
        return Division(axis, self.num_groups, "key heads", parts=parts, otherwise=UnevenDivision.SHARE)
