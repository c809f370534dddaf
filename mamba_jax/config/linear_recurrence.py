"""Mixers with a linear recurrence of heads: Mamba2 (Dao and Gu, "Transformers are SSMs", 2024), gated delta nets
(Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025), and
lightning attention (Qin et al., "Lightning Attention-2", 2024).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    MixerConfig,
    ModelConfigError,
    Placement,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
    UnevenDivision,
    declared,
    positive,
    wide_enough,
)

DELTA, LIGHTNING = "D", "F"
"""Letters of mixers in a pattern: gated delta nets, and lightning attention with its fixed decays."""


def _recurrent_state(
    name: str,
    shape: tuple[int, int, int],
    heads: Division,
    groups: Division,
    *,
    key_size: int,
    num_decays: int,
    erases: bool = False,
) -> tuple[StateArray, tuple[StateArray, ...]]:
    """Returns the recurrent state called `name`, and its tail as `kernels_pallas.recurrence.Tail` has it."""

    def tail(field: str, size: int, role: Role, division: Division) -> StateArray:
        return StateArray(f"{name}_{field}", (size,), role, division, StateUnit.TAIL, of=name)

    kernels = ("tpu", "gpu") if erases else ("tpu", "gpu", "cpu")
    strength = () if erases else (tail("strength", shape[0], Role.GATE, heads),)
    return StateArray(name, shape, Role.ACCUMULATED, heads, replay_kernels=kernels), (
        tail("value", shape[0] * shape[1], Role.GATE if erases else Role.ACTIVATION, heads),
        tail("key", key_size, Role.ACTIVATION, groups),
        tail("log_decay", num_decays, Role.GATE, heads),
        *strength,
    )


@dataclass(frozen=True)
class GroupedRecurrence:
    """Heads in groups with one query and key, and two convolutions. The inner width is `num_heads * head_dim`."""

    num_heads: int
    """Of values."""
    head_dim: int
    """Of a value."""
    state_size: int
    """Of a key."""
    num_groups: int
    """Heads of keys."""
    conv_width: int
    of_heads: ClassVar[str]
    """How messages call the heads."""
    of_groups: ClassVar[str]
    arrays: ClassVar[tuple[str, str, str]]
    """Names of the layer's arrays in the store: states, and windows of the convolutions of values, and of vectors."""
    erases: ClassVar[bool]
    """Whether the recurrence erases; see `kernels_pallas.recurrence`."""

    def __post_init__(self) -> None:
        positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        wide_enough(self.conv_width)
        if self.num_heads % self.num_groups:
            raise ModelConfigError(
                f"{self.num_heads} {self.of_heads} cannot be divided into {self.num_groups} {self.of_groups}"
            )

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
        return self.num_heads

    def state(self) -> tuple[StateArray, ...]:
        """The recurrent state, windows of raw convolution inputs, oldest first (of values; of queries and keys), and
        the state's tail."""
        (name, values, vectors), window = self.arrays, self.conv_width - 1
        state, tail = _recurrent_state(
            name,
            (self.num_heads, self.head_dim, self.state_size),
            self._heads(0),
            # A device keeps the groups that its heads need, though it has computed all.
            Division(0, self.num_groups, self.of_groups, otherwise=UnevenDivision.REPEAT),
            key_size=self.key_size,
            num_decays=self.num_decays,
            erases=self.erases,
        )
        return (
            state,
            StateArray(values, (window, self.inner_size), Role.WINDOW, self._heads(1)),
            StateArray(vectors, (window, 2 * self.key_size), Role.WINDOW, self._groups(1, parts=2)),
            *tail,
        )

    def _heads(self, axis: int, *, rank: int = 2) -> Division:
        return Division(axis, self.num_heads, self.of_heads, rank=rank)

    def _groups(self, axis: int, *, parts: int = 1, rank: int = 2) -> Division:
        return Division(axis, self.num_groups, self.of_groups, parts=parts, otherwise=UnevenDivision.SHARE, rank=rank)


@dataclass(frozen=True)
class MambaConfig(GroupedRecurrence, MixerConfig):
    """A Mamba2 mixer. The inner width is `num_heads * head_dim`."""

    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Step sizes are clamped to it, after softplus."""
    norm: bool = True
    """Normalize the gated output; otherwise only gate it."""
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
        super().__post_init__()
        low, high = self.dt_limit
        if not 0 <= low <= high:
            raise ModelConfigError(f"step sizes limited to {low}..{high}: expected 0 <= low <= high")

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._heads(1, rank=3), "in_proj_zx.weight"),
            (self._groups(1, rank=3), "in_proj_bc.weight"),
            (self._heads(0), "in_proj_dt.weight conv_x.weight dt_bias a_log d"),
            (self._heads(1), "out_proj.weight"),
            (WHOLE, "conv_bc.weight"),  # tiny: each device picks its own
            (self._heads(1), "in_proj_zx.bias", self.in_bias),
            (self._groups(1), "in_proj_bc.bias", self.in_bias),
            (self._heads(0), "in_proj_dt.bias", self.in_bias),
            (self._heads(0), "conv_x.bias", self.conv_bias),
            (WHOLE, "conv_bc.bias", self.conv_bias),
            (self._heads(0), "norm.weight", self.norm),
            (ADDED_ONCE, "out_proj.bias", self.out_bias),
        )


@dataclass(frozen=True)
class DeltaConfig(GroupedRecurrence, RecurrenceConfig):
    """A gated delta net: value heads in groups, each group with the key (and query) head that its value heads share.

    Kimi Delta Attention is the same, but that every channel of a key decays on its own.
    """

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
        super().__post_init__()
        if self.log_decay_bound is not None and not self.log_decay_bound < 0:
            raise ModelConfigError(f"log_decay_bound is {self.log_decay_bound}: a negative number is expected")

    @property
    def num_decays(self) -> int:
        """Of a token."""
        return self.num_heads * (self.state_size if self.decay == "channel" else 1)

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._groups(0), "q_proj.weight k_proj.weight"),
            (self._heads(0), "v_proj.weight b_proj.weight conv_v.weight dt_bias a_log"),
            (WHOLE, "conv_qk.weight norm.weight"),  # the convolution is tiny: each device picks its own
            (self._heads(1), "out_proj.weight"),
            (WHOLE, "z_proj.down.weight a_proj.down.weight", self.gate_rank),
            (self._heads(0), "z_proj.up.weight a_proj.up.weight", self.gate_rank),
            (self._heads(0), "z_proj.weight a_proj.weight", not self.gate_rank),
        )


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
        size, heads = self.head_dim, self._heads(0)
        state, tail = _recurrent_state(
            "ssm", (self.num_heads, size, size), heads, heads, key_size=self.inner_size, num_decays=self.num_heads
        )
        return state, *tail

    def parameters(self) -> Mapping[str, Placement]:
        inner = "qkv_proj.weight gate_proj.weight norm.weight"
        return declared((self._heads(0), inner), (self._heads(1), "out_proj.weight"))

    def _heads(self, axis: int) -> Division:
        return Division(axis, self.num_heads, "lightning attention heads")
