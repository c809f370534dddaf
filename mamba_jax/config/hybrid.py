"""The description of a model that every family maps its config.json to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mamba_jax.config.attention import AttentionConfig, LatentAttentionConfig
from mamba_jax.config.declaration import (
    BothMixers,
    MixerConfig,
    ModelConfigError,
    RecurrenceConfig,
    Role,
    StateArray,
    StateUnit,
    need,
    positive,
)
from mamba_jax.config.drafter import DrafterConfig
from mamba_jax.config.feed_forward import MLPConfig, MoEConfig
from mamba_jax.config.linear_recurrence import MambaConfig

MAMBA, ATTENTION, WINDOWED, LATENT, MLP, MOE, PARALLEL, SHARED = KINDS = "M*WL-EPZ"
"""Kinds of sublayer, as in `HybridConfig.pattern`."""
_PARTS = {
    MAMBA: ("mamba",), ATTENTION: ("attention",), WINDOWED: ("windowed_attention",), LATENT: ("latent_attention",),
    MLP: ("mlp",), MOE: ("moe",), PARALLEL: ("mamba", "attention"), SHARED: ("mamba", "attention", "mlp", "shared"),
}  # fmt: skip
"""The fields of `HybridConfig` that describe each kind."""
DRAFT_KINDS = ATTENTION + LATENT + MLP + MOE
"""The kinds of sublayers that a multi-token-prediction layer may have."""


@dataclass(frozen=True)
class SharedConfig:
    """Zamba2's shared transformer blocks (Glorioso et al., 2024), which the `Z` sublayers use in rotation."""

    num_blocks: int
    adapter_rank: int
    attention_adapters: bool
    """Each use also has adapters for queries, keys and values (it always has one for the MLP)."""

    def __post_init__(self) -> None:
        positive(self, "num_blocks", "adapter_rank")


@dataclass(frozen=True)
class NormedResidual:
    """The output of sublayers of one kind: input_multiplier * norm(x) + output_multiplier * mixer(norm(x))."""

    kind: str
    """As in `HybridConfig.pattern`."""
    input_multiplier: float
    output_multiplier: float


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model: a flat list of pre-norm residual sublayers between an embedding and a head."""

    family: str
    vocab_size: int
    hidden_size: int
    pattern: str
    """One character per sublayer: M Mamba, * attention, W attention to a window, L attention over latents, - MLP,
    E mixture of experts, P Mamba and attention in parallel on the same input, Z Mamba whose input a shared transformer
    block has added to; or the letter of a recurrence."""
    norm_eps: float
    mamba: MambaConfig | None = None
    attention: AttentionConfig | None = None
    windowed_attention: AttentionConfig | None = None
    latent_attention: LatentAttentionConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    shared: SharedConfig | None = None
    recurrences: tuple[RecurrenceConfig, ...] = ()
    """Recurrent mixers other than Mamba2, each with its own letter."""
    norm_unit_offset: bool = False
    """Norms of hidden states multiply by 1 + weight, not by the weight."""
    norm_after: tuple[int, ...] = ()
    """Sublayers, by their places in the pattern, that normalize their mixer's output, not its input."""
    norm_both: bool = False
    """Sublayers normalize their mixer's output, too."""
    normed_residuals: tuple[NormedResidual, ...] = ()
    """Kinds of sublayers that add their mixer's output to its normalized input, not to x (MiniMax)."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of every sublayer's output."""
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None
    """Logits are cap * tanh(logits / cap); None: as they are."""
    residual_in_fp32: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mtp_pattern: str = ""
    """Sublayers (*, L, - and E only) of the multi-token-prediction layer; empty = none that can be used."""
    own_mtp_embedding: bool = False
    """The multi-token-prediction layer embeds tokens by a table of its own, not by the model's."""
    own_mtp_head: bool = False
    """It has a head of its own."""
    unused_mtp_layers: int = 0
    """Number of such layers in a checkpoint with several, each with its own weights: only one could be used."""
    drafter: DrafterConfig | None = None
    """A separate model that drafts from this one's hidden states, in place of a multi-token-prediction layer."""

    def __post_init__(self) -> None:
        positive(self, "vocab_size", "hidden_size")
        if not self.pattern:
            raise ModelConfigError("the model has no layers")
        kinds = KINDS + "".join(recurrence.letter for recurrence in self.recurrences)
        if len(set(kinds)) < len(kinds):
            raise ModelConfigError(f"a recurrence under a letter that is taken: {', '.join(kinds)}")
        for pattern, allowed in ((self.pattern, kinds), (self.mtp_pattern, DRAFT_KINDS)):
            if wrong := sorted(set(pattern) - set(allowed)):
                raise ModelConfigError(f"layer pattern {pattern!r} has {wrong}: allowed are {', '.join(allowed)}")
        for part in (part for kind in self.pattern + self.mtp_pattern for part in _PARTS.get(kind, ())):
            if getattr(self, part) is None:
                raise ModelConfigError(f"layer pattern {self.pattern!r} needs the description of {part}")
        full, windowed = self.attention, self.windowed_attention
        if full is not None and windowed is not None and full.num_heads != windowed.num_heads:
            raise ModelConfigError(
                f"{full.num_heads} attention heads, but {windowed.num_heads} in layers with a window: equal numbers "
                "are expected"
            )
        if self.mlp is not None and not isinstance(self.mlp.intermediate_size, int):
            sizes, mlps = len(self.mlp.intermediate_size), (self.pattern + self.mtp_pattern).count(MLP)
            if sizes < mlps:
                raise ModelConfigError(f"{sizes} intermediate sizes for {mlps} MLPs")
        if self.drafter is not None and (self.mtp_pattern or max(self.drafter.places) > len(self.pattern)):
            raise ModelConfigError(
                f"a drafter that reads hidden states at {list(self.drafter.places)} of {len(self.pattern)} sublayers "
                f"and a multi-token-prediction layer {self.mtp_pattern!r}: expected places in the model, and no layer"
            )

    def mixer(self, kind: str) -> MixerConfig:
        """Returns the mixer's config of a sublayer of this kind. For a `Z` sublayer, it includes its use of attention.

        Raises:
            ModelConfigError: the model has none of this kind.
        """
        if kind in (PARALLEL, SHARED):
            return BothMixers((("mamba", need(self.mamba)), ("attention", need(self.attention))))
        return need(getattr(self, _PARTS[kind][0])) if kind in _PARTS else self.recurrence(kind)

    def recurrence(self, letter: str) -> RecurrenceConfig:
        """Returns the recurrence under this letter.

        Raises:
            ModelConfigError: there is none.
        """
        return need(next((one for one in self.recurrences if one.letter == letter), None))

    def normed_residual(self, kind: str) -> NormedResidual | None:
        """Returns the residual of sublayers of this kind; None if they add to x itself."""
        return next((residual for residual in self.normed_residuals if residual.kind == kind), None)

    def state(self, kind: str, per: StateUnit) -> tuple[StateArray, ...]:
        """Returns the state arrays of a sublayer of this kind: in slots, in pages, or in tails.

        Tails hold what the mixer declares, and the inputs of its windows.
        """
        arrays = self.mixer(kind).state()
        inputs = (array.inputs() for array in arrays if array.role is Role.WINDOW)
        return tuple(array for array in (*arrays, *inputs) if array.per is per)

    @property
    def inner_size(self) -> int:
        """Channels that the widest of its recurrences works on; 0 without any."""
        return max(self.mixer(kind).inner_size for kind in self.pattern)

    @property
    def query_size(self) -> int:
        """Elements of a token's queries in the widest of its attentions; 0 without any."""
        found = (self.attention, self.windowed_attention, self.latent_attention)
        return max((each.num_heads * each.state()[0].shape[-1] for each in found if each is not None), default=0)

    @property
    def num_recurrent_layers(self) -> int:
        """Sublayers with a part in every slot."""
        return sum(bool(self.state(kind, StateUnit.SLOT)) for kind in self.pattern)

    @property
    def num_attention_uses(self) -> int:
        """Attentions of the model proper, each with its own keys and values (each use of a shared block too)."""
        return sum(bool(self.state(kind, StateUnit.TOKEN)) for kind in self.pattern)

    @property
    def experts_per_token(self) -> int:
        """Number of routed experts of a token in all layers, except draft layers."""
        return 0 if self.moe is None else self.pattern.count(MOE) * self.moe.experts_per_token

    @property
    def num_mtp_attention_layers(self) -> int:
        """Attentions of the multi-token-prediction layer."""
        return self.mtp_pattern.count(ATTENTION) + self.mtp_pattern.count(LATENT)

    @property
    def drafts(self) -> bool:
        """Whether the model has a layer or a drafter that drafts from its hidden states."""
        return bool(self.mtp_pattern) or self.drafter is not None

    @property
    def step_size(self) -> int:
        """Size of the hidden state that a step computes for each token, and that slots hold: what the head reads, then
        what the drafter reads."""
        return self.hidden_size + (0 if self.drafter is None else self.drafter.hidden_size)

    def with_drafter(self, drafter: DrafterConfig) -> HybridConfig:
        """Returns the model with a drafter in place of its multi-token-prediction layer."""
        return replace(self, mtp_pattern="", own_mtp_embedding=False, own_mtp_head=False, drafter=drafter)
