"""The description of a model that every family maps its config.json to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

Part = TypeVar("Part")

MAMBA, ATTENTION, MLP, MOE, PARALLEL, SHARED = "M*-EPZ"
"""Kinds of sublayer, as in `HybridConfig.pattern`."""
HAS_MAMBA, HAS_ATTENTION = (MAMBA, PARALLEL, SHARED), (ATTENTION, PARALLEL, SHARED)
"""Kinds that have recurrent state, and kinds that have keys and values."""

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
"""Activations of MLPs, by their Hugging Face names."""


class ConfigError(ValueError):
    """A model description that is wrong, or that asks for something that is not supported."""


@dataclass(frozen=True)
class MambaConfig:
    """A Mamba2 mixer (Dao and Gu, 2024). The inner width is `num_heads * head_dim`."""

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
    """Factors on what the input projection gives for z, x, B, C and dt."""
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "head_dim", "state_size", "num_groups")
        if self.conv_width < 2:
            raise ConfigError(f"a convolution over {self.conv_width} inputs: at least 2 are expected")
        if self.num_heads % self.num_groups:
            raise ConfigError(f"{self.num_heads} Mamba heads cannot be divided into {self.num_groups} groups")
        low, high = self.dt_limit
        if not 0 <= low <= high:
            raise ConfigError(f"step sizes limited to {low}..{high}: expected 0 <= low <= high")

    @property
    def inner_size(self) -> int:
        """Channels of z, of x and of the output."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Channels of B, and of C."""
        return self.num_groups * self.state_size


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `size` elements of each head (Su et al., 2021), halves rotated.

    An odd size turns one element more, at the frequencies of the odd size.
    """

    theta: float
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"rotary embedding of {self.size} elements of a head: at least 1 is expected")


@dataclass(frozen=True)
class AttentionConfig:
    """Causal attention with grouped keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores."""
    input_size: int
    """Width of what queries, keys and values are made of: the hidden size, or twice that in Zamba2."""
    bias: bool = False
    rope: RopeConfig | None = None
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads", "head_dim", "input_size")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads")
        if self.rope is not None and self.rope.size + self.rope.size % 2 > self.head_dim:
            raise ConfigError(f"rotary embedding of {self.rope.size} elements: a head has {self.head_dim}")


@dataclass(frozen=True)
class MLPConfig:
    """down(act(up x)), or if `gated` down(act(gate x) * up x)."""

    intermediate_size: int | tuple[int, ...]
    """One for all, or one for each MLP in model order."""
    activation: str
    gated: bool
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        _known_activation(self.activation)
        sizes = (self.intermediate_size,) if isinstance(self.intermediate_size, int) else self.intermediate_size
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"intermediate_size is {self.intermediate_size}: at least 1 is expected")

    def size(self, index: int) -> int:
        """Intermediate size of the model's MLP number `index`."""
        return self.intermediate_size if isinstance(self.intermediate_size, int) else self.intermediate_size[index]


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts, with an expert shared by all tokens beside it."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: str
    gated: bool
    router: Literal["sigmoid", "softmax"]
    """sigmoid: scores chosen after adding a correction bias, within the best groups (DeepSeek-V3). softmax: over the
    chosen logits."""
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    """Make the chosen sigmoid scores sum to 1."""
    scaling: float = 1.0
    latent_size: int | None = None
    """The experts work on a projection of this size (latent MoE); router and shared expert see the whole."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0 = none."""
    bias: bool = False
    """Of the latent projections and the shared expert."""

    def __post_init__(self) -> None:
        _known_activation(self.activation)
        _positive(self, "num_experts", "experts_per_token", "intermediate_size", "num_groups", "top_groups")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"{self.num_experts} experts in {self.num_groups} groups of which {self.top_groups} are chosen: "
                "the groups must be equal, and as many as are chosen"
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.top_groups:
            raise ConfigError(f"{self.experts_per_token} experts per token: there are not as many to choose from")
        if self.router == "sigmoid" and self.num_experts // self.num_groups < 2:
            raise ConfigError("groups of one expert: a group's score is the sum of its best two")


@dataclass(frozen=True)
class SharedConfig:
    """Zamba2's shared transformer blocks (Glorioso et al., 2024), used in turn by the `Z` sublayers."""

    num_blocks: int
    adapter_rank: int
    attention_adapters: bool
    """Each use also has adapters for queries, keys and values (it always has one for the MLP)."""

    def __post_init__(self) -> None:
        _positive(self, "num_blocks", "adapter_rank")


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model: a flat list of pre-norm residual sublayers between an embedding and a head."""

    family: str
    vocab_size: int
    hidden_size: int
    pattern: str
    """One character per sublayer: M Mamba, * attention, - MLP, E mixture of experts, P Mamba and attention in parallel
    on the same input, Z Mamba whose input a shared transformer block has added to."""
    norm_eps: float
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    shared: SharedConfig | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """On every sublayer's output."""
    logits_multiplier: float = 1.0
    residual_in_fp32: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp_pattern: str = ""
    """Sublayers (*, - and E only) of the multi-token-prediction layer; empty = none that can be used."""
    own_mtp_embedding: bool = False
    """The multi-token-prediction layer embeds tokens by a table of its own, not by the model's."""
    own_mtp_head: bool = False
    """It has a head of its own."""
    unused_mtp_layers: int = 0
    """How many such layers a checkpoint has that has several, each with weights of its own: only one could be used."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "hidden_size")
        if not self.pattern:
            raise ConfigError("a model without layers")
        for pattern, allowed in ((self.pattern, "M*-EPZ"), (self.mtp_pattern, "*-E")):
            if wrong := sorted(set(pattern) - set(allowed)):
                raise ConfigError(f"layer pattern {pattern!r} has {wrong}: allowed are {', '.join(allowed)}")
        used = set(self.pattern + self.mtp_pattern)
        for part, kinds in (("mamba", "MPZ"), ("attention", "*PZ"), ("mlp", "-Z"), ("moe", "E"), ("shared", "Z")):
            if used & set(kinds) and getattr(self, part) is None:
                raise ConfigError(f"layer pattern {self.pattern!r} needs the description of {part}")
        if self.mlp is not None and not isinstance(self.mlp.intermediate_size, int):
            sizes, mlps = len(self.mlp.intermediate_size), (self.pattern + self.mtp_pattern).count(MLP)
            if sizes < mlps:
                raise ConfigError(f"{sizes} intermediate sizes for {mlps} MLPs")

    @property
    def num_mamba_layers(self) -> int:
        """Mamba mixers, each with its own part of a slot."""
        return sum(kind in HAS_MAMBA for kind in self.pattern)

    @property
    def num_attention_uses(self) -> int:
        """Attentions of the model proper, each with its own keys and values (each use of a shared block too)."""
        return sum(kind in HAS_ATTENTION for kind in self.pattern)

    @property
    def num_mtp_attention_layers(self) -> int:
        """Attentions of the multi-token-prediction layer."""
        return self.mtp_pattern.count(ATTENTION)

    @property
    def num_attention_layers(self) -> int:
        """All arrays of keys and values: first the model's, in its order, then the multi-token-prediction layer's."""
        return self.num_attention_uses + self.num_mtp_attention_layers

    @property
    def ssm_state_shape(self) -> tuple[int, int, int]:
        """One Mamba layer's recurrent state in a slot: [heads, head_dim, state]."""
        mamba = need(self.mamba)
        return mamba.num_heads, mamba.head_dim, mamba.state_size

    @property
    def conv_state_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """One Mamba layer's convolution windows in a slot, of x and of B and C: [width - 1, channels]."""
        mamba = need(self.mamba)
        return (mamba.conv_width - 1, mamba.inner_size), (mamba.conv_width - 1, 2 * mamba.group_size)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """One attention's keys and values of a token: [2 * kv_heads, head_dim]."""
        attention = need(self.attention)
        return 2 * attention.num_kv_heads, attention.head_dim


def need(part: Part | None) -> Part:
    """A part of the config that is known to be there, because the pattern has sublayers of its kind.

    Raises:
        ConfigError: it is not.
    """
    if part is None:
        raise ConfigError("the model has no sublayer of this kind")
    return part


def _known_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported: known are {', '.join(ACTIVATIONS)}")


def _positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} is {getattr(config, name)}: at least 1 is expected")
