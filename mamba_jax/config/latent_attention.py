"""Attention over latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mamba_jax.config.attention import RopeConfig
from mamba_jax.config.declaration import WHOLE, Division, MixerConfig, Placement, Role, StateArray, StateUnit
from mamba_jax.config.errors import positive


@dataclass(frozen=True)
class LatentAttentionConfig(MixerConfig):
    """Multi-head latent attention: the keys and values of all heads are projections of one latent for each token.

    Another part of each key is shared by all heads. Only this part has position embeddings, if any.
    """

    num_heads: int
    key_size: int
    """Of the part of a head's query and key that comes from the latent."""
    shared_key_size: int
    """Of the part that all heads' keys share."""
    value_size: int
    latent_size: int
    norm_eps: float
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
        gate = {"gate_proj.weight": self._heads(0)} if self.head_gate else {}
        return gate | {
            "q_proj.weight": self._heads(0),
            "latent_proj.weight": WHOLE,
            "norm.weight": WHOLE,
            "k_up.weight": self._heads(0),
            "v_up.weight": self._heads(0),
            "o_proj.weight": self._heads(1),
        }

    def _heads(self, axis: int) -> Division:
        return Division(axis, self.num_heads, "attention heads")
