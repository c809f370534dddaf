"""Lightning attention (Qin et al., "Lightning Attention-2", 2024): linear attention with fixed decays by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from mamba_jax.config.declaration import Division, Placement, RecurrenceConfig, Role, StateArray, StateUnit
from mamba_jax.config.errors import positive

LIGHTNING = "F"
"""The mixer's letter in a pattern: F for its fixed decays."""


@dataclass(frozen=True)
class LightningConfig(RecurrenceConfig):
    """Lightning attention: the recurrence of Mamba2 where every step size is 1 and each head has its own query and key.

    Queries, keys and values have the same size.
    """

    num_heads: int
    head_dim: int
    norm_eps: float
    decay_factors: tuple[float, ...]
    """Factor on all heads' decay rates: one for each of the model's sublayers of this kind."""
    letter: str = LIGHTNING
    varying_bits: ClassVar[str] = "lightning attention"

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim")

    def at(self, index: int) -> LightningConfig:
        return replace(self, decay_factors=self.decay_factors[index : index + 1])

    def decay_rates(self, index: int) -> tuple[float, ...]:
        """Of each head of sublayer `index`: a state is multiplied by exp(-rate) at each token.

        The slopes of ALiBi (Press et al., 2022), which fall from head to head by the same factor, to 1/256.
        """
        factor = self.decay_factors[index]
        return tuple(factor * 2 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads))

    @property
    def inner_size(self) -> int:
        """Channels of the values, of the gate and of the output."""
        return self.num_heads * self.head_dim

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, and its tail as `kernels_pallas.recurrence.Tail` has it."""
        recurrent, heads = (self.num_heads, self.head_dim, self.head_dim), self._heads(0)
        return (
            StateArray("ssm", recurrent, Role.ACCUMULATED, heads, replay_kernels=("tpu", "gpu", "cpu")),
            StateArray("ssm_value", (self.inner_size,), Role.ACTIVATION, heads, StateUnit.TAIL, of="ssm"),
            StateArray("ssm_key", (self.inner_size,), Role.ACTIVATION, heads, StateUnit.TAIL, of="ssm"),
            StateArray("ssm_log_decay", (self.num_heads,), Role.STEERING, heads, StateUnit.TAIL, of="ssm"),
            StateArray("ssm_strength", (self.num_heads,), Role.STEERING, heads, StateUnit.TAIL, of="ssm"),
        )

    def parameters(self) -> Mapping[str, Placement]:
        return {
            "qkv_proj.weight": self._heads(0),
            "gate_proj.weight": self._heads(0),
            "norm.weight": self._heads(0),
            "out_proj.weight": self._heads(1),
        }

    def _heads(self, axis: int) -> Division:
        return Division(axis, self.num_heads, "lightning attention heads")
