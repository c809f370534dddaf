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
    declared,
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
        found = declared(
            (WHOLE, "fc.weight final_norm.weight"),
            (_table(target_vocab), "embed.weight", self.own_embedding),
            (_table(self.vocab_size), "lm_head.weight", self.own_head),
            (WHOLE, "tokens", self.maps_vocabulary),
        )
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
        own = declared((WHOLE, "layers.0.hidden_norm.weight"), (WHOLE, "states_norm.weight", self.norms_states))
        return {**super().parameters(target_vocab), **own}


@dataclass(frozen=True)
class BlockConfig(DrafterConfig):
    """DFlash and DFlash 2 (Chen et al., 2026, arXiv:2602.06036; z-lab/dflash), and DSpark (DeepSeek, 2026,
    arXiv:2607.05147): a block of tokens in one pass.

    All read the newest token and a mask token in place of each unknown one. Their keys and values of earlier tokens
    are projections of the target's hidden states.
    """

    mask_token: int = 0
    """The id of the mask token, which takes the place of tokens to predict."""
    markov_rank: int = 0
    """DSpark: rank of the table that adds to the logits of a token those of following the token before; 0: DFlash."""
    from_newest: bool = False
    """The output at each token predicts the next one, so that the newest token gives the first draft. Otherwise the
    output at a mask token predicts the token in its place."""
    estimates: bool = False
    """DSpark's confidence head: it estimates how likely a draft is right, given that those before it are."""
    estimates_by_token: bool = False
    """The confidence head reads the token before, too."""
    conv_kernel: int = 0
    """DFlash 2: tokens that the convolutions around each sublayer reach; 0: there are none."""
    conv_group: int = 1
    """DFlash 2: neighboring channels with a common factor that depends on the token."""
    selector_rank: int = 0
    """DFlash 2: rank of the scores of pairs of candidates for neighboring tokens; 0: there are none."""
    selector_top: int = 0
    """DFlash 2: number of candidates for each token."""
    logit_multiplier: float = 1.0
    logit_cap: float = 0.0
    """Logits are brought between -cap and cap by tanh; 0: they stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_kernel and (self.conv_group < 1 or self.hidden_size % self.conv_group):
            raise ModelConfigError(f"{self.hidden_size} channels cannot be divided into groups of {self.conv_group}")
        if self.selector_rank and not 1 <= self.selector_top <= self.vocab_size:
            raise ModelConfigError(f"selector_top_k is {self.selector_top}: expected 1 to {self.vocab_size}")
        if self.selector_rank and self.maps_vocabulary:
            raise ModelConfigError("a drafter with a candidate selector and a vocabulary of its own is not supported")

    @property
    def method(self) -> str:
        return "dspark" if self.markov_rank else "dflash"

    def lookahead(self, count: int) -> int:
        return count if self.from_newest else count + 1

    def parameters(self, target_vocab: int) -> Mapping[str, Placement]:
        convs = [f"layers.{layer}.{part}_conv" for layer in range(self.num_layers) for part in ("attention", "mlp")]
        own = declared(
            (WHOLE, "states_norm.weight"),
            (_table(target_vocab), "markov_before.weight", self.markov_rank),
            (_table(self.vocab_size), "markov_after.weight", self.markov_rank),
            (WHOLE, "confidence.weight confidence.bias", self.estimates),
            (WHOLE, "selector.hidden.weight selector.before.weight selector.after.weight", self.selector_rank),
            (WHOLE, " ".join(f"{conv}.base {conv}.projection.weight" for conv in convs), self.conv_kernel),
        )
        return {**super().parameters(target_vocab), **own}


def _table(vocab_size: int) -> Division:
    return Division(0, vocab_size, "words", otherwise=UnevenDivision.KEEP_WHOLE)
