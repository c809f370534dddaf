"""Mixers without state: MLPs and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mamba_jax.config.declaration import (
    ADDED_ONCE,
    WHOLE,
    Division,
    MixerConfig,
    ModelConfigError,
    Placement,
    declared,
    positive,
)

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")
"""Activations of MLPs, by their Hugging Face names."""


@dataclass(frozen=True)
class MLPConfig(MixerConfig):
    """down(act(up x)), or if `gated` down(act(gate x) * up x)."""

    intermediate_size: int | tuple[int, ...]
    """One for all, or one for each MLP in model order."""
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0

    def __post_init__(self) -> None:
        known_activation(self.activation)
        sizes = (self.intermediate_size,) if isinstance(self.intermediate_size, int) else self.intermediate_size
        if not sizes or min(sizes) < 1:
            raise ModelConfigError(f"intermediate_size is {self.intermediate_size}: at least 1 is expected")

    def size(self, index: int) -> int:
        """Intermediate size of the model's MLP number `index`."""
        return self.intermediate_size if isinstance(self.intermediate_size, int) else self.intermediate_size[index]

    def at(self, index: int) -> MLPConfig:
        return replace(self, intermediate_size=self.size(index))

    def parameters(self) -> Mapping[str, Placement]:
        return _mlp_parameters(self.size(0), "MLP channels", gated=self.gated, bias=self.bias)


@dataclass(frozen=True)
class MoEConfig(MixerConfig):
    """A mixture of experts with an additional expert that all tokens share."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    router: Literal["sigmoid", "softmax", "softmax_all"]
    """sigmoid: scores chosen after adding a correction bias, within the best groups (DeepSeek-V3). softmax: over the
    chosen logits. softmax_all: over all logits, so that the chosen weights sum to less than 1 (Jamba)."""
    activation: str = "silu"
    gated: bool = True
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    """Make the chosen sigmoid scores sum to 1."""
    scaling: float = 1.0
    latent_size: int | None = None
    """The experts work on a projection of this size (latent MoE); router and shared expert see the whole."""
    shared_size: int = 0
    """Intermediate size of the shared expert; 0 = none."""
    shared_gate: bool = False
    """The output of the shared expert is multiplied by the sigmoid of one number for each token."""
    bias: bool = False
    """Whether the latent projections and the shared expert have biases."""
    balance: float = 0.0
    """In training: coefficient of the auxiliary loss that spreads tokens evenly over experts."""

    def __post_init__(self) -> None:
        known_activation(self.activation)
        positive(self, "num_experts", "experts_per_token", "intermediate_size", "num_groups", "top_groups")
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ModelConfigError(
                f"{self.num_experts} experts in {self.num_groups} groups of which {self.top_groups} are chosen: "
                "the groups must be equal, and as many as are chosen"
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.top_groups:
            raise ModelConfigError(f"{self.experts_per_token} experts per token: there are not as many to choose from")
        if self.router == "sigmoid" and self.num_experts // self.num_groups < 2:
            raise ModelConfigError("groups of one expert: a group's score is the sum of its best two")

    def parameters(self) -> Mapping[str, Placement]:
        size, experts = self.intermediate_size, self.num_experts

        def by_experts(channels_axis: int, rank: int) -> Division:
            """Returns the division: each device has some of the experts, or else a piece of every expert."""
            pieces = Division(channels_axis, size, f"channels in each of {experts} experts", rank=rank)
            return Division(0, experts, "experts", otherwise=pieces, rank=rank)

        found = declared(
            (WHOLE, "router.weight"),
            (by_experts(2, 4) if self.gated else by_experts(1, 3), "experts.up"),
            (by_experts(2, 3), "experts.down"),
            (WHOLE, "router.correction_bias", self.router == "sigmoid"),
            (WHOLE, "latent_in.weight latent_out.weight", self.latent_size),
            (WHOLE, "latent_in.bias", self.latent_size and self.bias),
            (ADDED_ONCE, "latent_out.bias", self.latent_size and self.bias),
            (WHOLE, "shared_gate.weight", self.shared_gate),
        )
        if self.shared_size:
            what = "channels of the shared expert"
            shared = _mlp_parameters(self.shared_size, what, gated=self.gated, bias=self.bias)
            found |= {f"shared.{path}": placement for path, placement in shared.items()}
        return found


def _mlp_parameters(size: int, what: str, *, gated: bool, bias: bool) -> dict[str, Placement]:
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    return declared(
        (Division(1, size, what), "down_proj.weight"),
        (Division(0, size, what), " ".join(f"{name}.weight" for name in names)),
        (Division(0, size, what), " ".join(f"{name}.bias" for name in names), bias),
        (ADDED_ONCE, "down_proj.bias", bias),
    )


def known_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ModelConfigError(f"activation {name!r} is not supported: known are {', '.join(ACTIVATIONS)}")
