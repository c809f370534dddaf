"""Drafters: separate models that draft from the hidden states of chosen layers of another model, the target."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mamba_jax.config.attention import AttentionConfig
from mamba_jax.config.declaration import (
    WHOLE,
    Division,
    ModelConfigError,
    Placement,
    StateArray,
    UnevenDivision,
    positive,
)
from mamba_jax.config.feed_forward import MLPConfig


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter: transformer layers over the hidden states that the target has at some places."""

    hidden_size: int
    vocab_size: int
    """Size of the draft vocabulary, which may be a part of the target's."""
    places: tuple[int, ...]
    """Where hidden states are taken: before the sublayers with these indices in `HybridConfig.pattern`, or after the
    last one."""
    attention: AttentionConfig
    mlp: MLPConfig
    norm_eps: float
    num_layers: int = 1
    own_embedding: bool = False
    """The drafter embeds tokens by a table of its own, not by the target's."""
    own_head: bool = True
    """It has an output head of its own."""
    maps_vocabulary: bool = False
    """It has a table of the target's token for each token of the draft vocabulary."""
    embedding_multiplier: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "hidden_size", "vocab_size", "num_layers")
        if not self.places or min(self.places) < 0:
            raise ModelConfigError(f"a drafter reads hidden states at {list(self.places)}: expected at least one place")

    @property
    def method(self) -> str:
        """The name of the kind of drafter in `--speculative-method`."""
        raise NotImplementedError

    def lookahead(self, count: int) -> int:
        """Returns how many tokens after a row's committed ones have keys and values when it drafts `count` tokens."""
        return count

    def state(self) -> tuple[StateArray, ...]:
        """Returns the keys and values of each layer in the pages."""
        return tuple(replace(array, name="draft_kv") for array in self.attention.state()) * self.num_layers

    def parameters(self, target_vocab: int) -> Mapping[str, Placement]:
        """Every parameter by its dotted path from the drafter on, and how it is divided over devices."""
        found: dict[str, Placement] = {"fc.weight": WHOLE, "final_norm.weight": WHOLE}
        if self.own_embedding:
            found["embed.weight"] = _table(target_vocab)
        if self.own_head:
            found["lm_head.weight"] = _table(self.vocab_size)
        if self.maps_vocabulary:
            found["tokens"] = WHOLE
        for layer in range(self.num_layers):
            for name, mixer in (("attention", self.attention), ("mlp", self.mlp)):
                found |= {f"layers.{layer}.{name}.{path}": put for path, put in mixer.parameters().items()}
                found[f"layers.{layer}.{name}_norm.weight"] = WHOLE
        return found


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    """EAGLE-3 (Li et al., 2025, arXiv:2503.01840)."""

    normed_residual: bool = False
    """The first layer adds to the norm of the hidden state, not to the hidden state itself."""
    norms_states: bool = False
    """The target's concatenated hidden states pass an RMS norm before they are projected."""

    @property
    def method(self) -> str:
        return "eagle3"

    def parameters(self, target_vocab: int) -> Mapping[str, Placement]:
        found = dict(super().parameters(target_vocab)) | {"layers.0.hidden_norm.weight": WHOLE}
        return found | ({"states_norm.weight": WHOLE} if self.norms_states else {})


@dataclass(frozen=True)
class BlockConfig(DrafterConfig):
    """DFlash (Chen et al., 2026, arXiv:2602.06036), and DSpark (DeepSeek, 2026): a block of tokens in one pass.

    Both read the newest token and a mask token in place of each unknown one. Their keys and values of earlier tokens
    are projections of the target's hidden states.
    """

    mask_token: int = 0
    """The id of the mask token, which takes the place of tokens to predict."""
    markov_rank: int = 0
    """DSpark: rank of the table that adds to the logits of a token those of following the token before; 0: DFlash."""
    from_newest: bool = False
    """The output at each token predicts the next one, so that the newest token gives the first draft. Otherwise the
    output at a mask token predicts the token in its place."""

    @property
    def method(self) -> str:
        return "dspark" if self.markov_rank else "dflash"

    def lookahead(self, count: int) -> int:
        return count if self.from_newest else count + 1

    def parameters(self, target_vocab: int) -> Mapping[str, Placement]:
        found = dict(super().parameters(target_vocab)) | {"states_norm.weight": WHOLE}
        if self.markov_rank:
            found |= {"markov_before.weight": _table(target_vocab), "markov_after.weight": _table(self.vocab_size)}
        return found


def _table(vocab_size: int) -> Division:
    return Division(0, vocab_size, "words", otherwise=UnevenDivision.KEEP_WHOLE)
