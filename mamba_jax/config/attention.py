"""Causal attention with grouped keys and values or over latents, with or without rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    MixerConfig,
    ModelConfigError,
    Placement,
    Role,
    StateArray,
    StateUnit,
    UnevenDivision,
    declared,
    positive,
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `size` elements of each head (Su et al., 2021), halves rotated.

    An odd size turns one element more, at the frequencies of the odd size.
    """

    theta: float
    size: int
    frequencies: tuple[float, ...] = ()
    """Radians per position of each pair of elements; empty: powers of theta."""
    scale: float = 1.0
    """Factor of cosine and sine."""
    positions: int = 0
    """Number of positions that scaled frequencies are made for; 0: the model's own."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ModelConfigError(f"rotary embedding of {self.size} elements of a head: at least 1 is expected")


@dataclass(frozen=True)
class QKNormConfig:
    """RMS norms of queries and keys, before they are rotated: of each head's, or of all heads' together."""

    eps: float
    unit_offset: bool = False
    """Multiply by 1 + weight, not by the weight."""
    all_heads: bool = False


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Causal attention with grouped keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores."""
    input_size: int
    """Input width of the projections of queries, keys and values: the hidden size, or twice that in Zamba2."""
    bias: bool = False
    output_bias: bool = False
    """Whether the output projection has a bias where the others have none."""
    rope: RopeConfig | None = None
    qk_norm: QKNormConfig | None = None
    kv_scales: bool = False
    """The checkpoint has factors that divide keys and values in 8 bits."""
    output_gate: bool = False
    """Multiply the output of attention by the sigmoid of a gate. The projection of queries computes the gate: each head
    has its query, then its gate."""
    head_gate: bool = False
    """Multiply the output of each head by the sigmoid of a projection of the input."""
    window: int | None = None
    """Number of keys that a query sees at most, its own included; None: all. The pages of older keys stay."""
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "num_heads", "num_kv_heads", "head_dim", "input_size")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads")
        if self.window is not None and self.window < 1:
            raise ModelConfigError(f"an attention window of {self.window} keys: at least 1 is expected")
        if self.rope is not None and self.rope.size + self.rope.size % 2 > self.head_dim:
            raise ModelConfigError(f"rotary embedding of {self.rope.size} elements: a head has {self.head_dim}")

    def state(self) -> tuple[StateArray, ...]:
        """Keys (even) and values (odd) of each token's heads."""
        shape = (2 * self.num_kv_heads, self.head_dim)
        return (StateArray("kv", shape, Role.ACTIVATION, self.kv_heads(0, UnevenDivision.REPEAT), StateUnit.TOKEN),)

    def parameters(self) -> Mapping[str, Placement]:
        heads, kv_heads = self.heads(0), self.kv_heads(0, UnevenDivision.SHARE)
        all_heads = self.qk_norm is not None and self.qk_norm.all_heads
        return declared(
            (heads, "q_proj.weight"),
            (kv_heads, "k_proj.weight v_proj.weight"),
            (self.heads(1), "o_proj.weight"),
            (WHOLE, "q_norm.weight k_norm.weight", self.qk_norm is not None and not all_heads),
            (heads, "q_norm.weight", all_heads),
            (kv_heads, "k_norm.weight", all_heads),
            (heads, "gate_proj.weight", self.head_gate),
            (WHOLE, "k_scale v_scale", self.kv_scales),
            (heads, "q_proj.bias", self.bias),
            (kv_heads, "k_proj.bias v_proj.bias", self.bias),
            (ADDED_ONCE, "o_proj.bias", self.bias or self.output_bias),
        )

    def heads(self, axis: int) -> Division:
        """Returns the division of heads of queries."""
        return Division(axis, self.num_heads, "attention heads")

    def kv_heads(self, axis: int, otherwise: UnevenDivision) -> Division:
        """Returns the division of heads of keys and values."""
        return Division(axis, self.num_kv_heads, "key-value heads", otherwise=otherwise)


@dataclass(frozen=True)
class LatentAttentionConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    The keys and values of all heads are projections of one latent for each token. Another part of each key is shared by
    all heads; only this part has position embeddings, if any.
    """

    num_heads: int
    key_size: int
    """Of the part of a head's query and key that comes from the latent."""
    shared_key_size: int
    """Of the part that all heads' keys share."""
    value_size: int
    latent_size: int
    norm_eps: float
    """Of the norms of latents."""
    query_latent_size: int = 0
    """Queries are projections of a normalized latent of this size; 0: of the input itself."""
    rope: RopeConfig | None = None
    """Rotates the shared part of keys and the same part of queries: elements 2i and 2i + 1 are a pair."""
    head_gate: bool = False
    """The output of each head is multiplied by the sigmoid of a projection of the input."""

    def __post_init__(self) -> None:
        positive(self, "num_heads", "key_size", "shared_key_size", "value_size", "latent_size")

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return (self.key_size + self.shared_key_size) ** -0.5

    @property
    def entry_size(self) -> int:
        """Numbers that are kept of a token: its latent, and the shared part of its keys."""
        return self.latent_size + self.shared_key_size

    def state(self) -> tuple[StateArray, ...]:
        """The latent and the shared key of each token. There is one for all heads: every device has all of them."""
        return (StateArray("latent", (1, self.entry_size), Role.ACTIVATION, None, StateUnit.TOKEN),)

    def parameters(self) -> Mapping[str, Placement]:
        return declared(
            (self._heads(0), "q_proj.weight k_up.weight v_up.weight"),
            (WHOLE, "latent_proj.weight norm.weight"),
            (self._heads(1), "o_proj.weight"),
            (self._heads(0), "gate_proj.weight", self.head_gate),
            (WHOLE, "q_latent_proj.weight q_norm.weight", self.query_latent_size),
        )

    def _heads(self, axis: int) -> Division:
        return Division(axis, self.num_heads, "attention heads")
