"""What several families share: readings of config.json, and names of our modules' parameters in checkpoints.

Functions of type `Names` give each parameter of a mixer by its path from the mixer on, and the tensor by its name from
the mixer's on; `layers` and `whole_model` put both in their places.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from mamba_jax.config import (
    ATTENTION,
    LATENT,
    MAMBA,
    MLP,
    MOE,
    WINDOWED,
    AttentionConfig,
    HybridConfig,
    LatentAttentionConfig,
    MambaConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
)
from mamba_jax.config.channel_recurrence import MAMBA1, Mamba1Config
from mamba_jax.config.linear_recurrence import DeltaConfig
from mamba_jax.families.base import Family, HFSource, placed, tensor, with_prefix
from mamba_jax.families.fields import PUBLISHED, Fields
from mamba_jax.families.rope import rope_config

Names = Callable[[Any, int], dict[str, HFSource]]
"""Takes a mixer's configuration and the hidden size."""
Spelling = str | Sequence[str]
"""A name, or several of which a checkpoint has one."""
Mixers = Mapping[str, tuple[Spelling, Names]]
"""For each kind of sublayer: the mixer's name in its layer, and the names of its parameters."""

MAMBA_KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION}
"""Types of layers of Mamba2 and attention, in transformers' words."""
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Names of the gate, up and down projection of an MLP or an expert: ours and most families'."""


def common_fields(
    fields: Fields,
    family: str,
    hidden: int,
    eps: float,
    *,
    vocab: int | None = None,
    tied: bool = False,
    bos: int | None = None,
    eos: int | None = None,
    silu: str | None = "hidden_act",
) -> dict[str, Any]:
    """Reads the fields around the layers, named equally in most families. The keywords are defaults, as of `Fields`.

    `silu`: the name of the field with the activation, if only SiLU is supported.
    """
    if silu is not None:
        fields.only(silu, ("silu", "swish"))
    return {
        "family": family,
        "hidden_size": hidden,
        "norm_eps": eps,
        "vocab_size": fields.integer("vocab_size", vocab),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tied),
        "max_position_embeddings": fields.integer("max_position_embeddings", 0) or None,
        "bos_token_id": fields.token("bos_token_id", bos),
        "eos_token_ids": fields.tokens("eos_token_id", eos),
    }


def attention_config(
    fields: Fields,
    hidden: int,
    *,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rope: Mapping[str, Any] | None = {},
    **options: Any,
) -> AttentionConfig:
    """Reads attention from the usual fields.

    Args:
        num_heads: default, as `num_kv_heads` (None: all) and `head_dim` (None: a head's part of the hidden size).
        rope: arguments of `rope_config`; None: without positions.
        options: of `AttentionConfig`; `scale` is 1 / sqrt(head_dim) by default.
    """
    heads = fields.integer("num_attention_heads", num_heads)
    if heads < 1:
        raise ModelConfigError(f"config field num_attention_heads is {heads}: at least 1 is expected")
    size = fields.integer("head_dim", hidden // heads if head_dim is None else head_dim)
    arguments: dict[str, Any] = {
        "scale": max(size, 1) ** -0.5,
        "input_size": hidden,
        "bias": fields.flag("attention_bias", False),
        "rope": None if rope is None else rope_config(fields, size, **rope),
    }
    kv_heads = fields.key_value_heads(heads, num_kv_heads)
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=size, **arguments | options)


def moe_config(
    fields: Fields,
    *,
    size_field: str = "moe_intermediate_size",
    router: Literal["sigmoid", "softmax", "softmax_all"] = "sigmoid",
    shared: bool = False,
    **options: Any,
) -> MoEConfig:
    """Reads a mixture of experts from the usual fields.

    Args:
        shared: whether the family has a field with the number of shared experts.
        options: of `MoEConfig`.
    """
    size = fields.integer(size_field)
    if router == "sigmoid":
        options |= {
            "num_groups": fields.integer("n_group", 1, "num_expert_group"),
            "top_groups": fields.integer("topk_group", 1),
            "normalize": fields.flag("norm_topk_prob", True, "moe_renormalize"),
            "scaling": fields.number("routed_scaling_factor", 1.0),
        }
    if shared:
        options["shared_size"] = size * fields.integer("num_shared_experts", None, "n_shared_experts")
    return MoEConfig(
        num_experts=fields.integer("num_experts", None, "num_local_experts", "n_routed_experts"),
        experts_per_token=fields.integer("num_experts_per_tok", None, "num_experts_per_token"),
        intermediate_size=size,
        router=router,
        **options,
    )


def mlp_config(fields: Fields, size: int | None = None, **options: Any) -> MLPConfig:
    """Reads a gated MLP from the usual fields. `size` is the default of `intermediate_size`."""
    activation, bias = fields.text("hidden_act", "silu"), fields.flag("mlp_bias", False)
    return MLPConfig(fields.integer("intermediate_size", size), activation, bias=bias, **options)


def mamba_config(
    fields: Fields, eps: float, *, heads: int, head_dim: int, bias: bool, limited: bool = True
) -> MambaConfig:
    """Reads a Mamba2 mixer from the usual fields. `limited`: whether step sizes are limited."""
    arguments: dict[str, Any] = {
        "dt_limit": fields.numbers("time_step_limit", (0.0, math.inf)) if limited else (0.0, math.inf),
        "state_size": fields.integer("mamba_d_state", None, "ssm_state_size", "state_size"),
        "num_groups": fields.integer("mamba_n_groups", None, "mamba_ngroups", "n_groups"),
        "conv_width": fields.integer("mamba_d_conv", 4, "conv_kernel"),
        "conv_bias": fields.flag("mamba_conv_bias", True, "use_conv_bias"),
        "norm_eps": eps,
    }
    return MambaConfig(num_heads=heads, head_dim=head_dim, in_bias=bias, out_bias=bias, **arguments)


def delta_config(
    fields: Fields,
    eps: float,
    *,
    values: int | None = None,
    keys: int | None = None,
    value_size: int = 128,
    key_size: int = 128,
    beta: float = 1.0,
) -> DeltaConfig:
    """Reads a gated delta net from the usual fields. Numbers and sizes of heads are defaults."""
    return DeltaConfig(
        num_heads=fields.integer("linear_num_value_heads", values),
        head_dim=fields.integer("linear_value_head_dim", value_size),
        state_size=fields.integer("linear_key_head_dim", key_size),
        num_groups=fields.integer("linear_num_key_heads", keys),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        norm_eps=eps,
        beta_scale=beta,
    )


def refuse_window(fields: Fields) -> None:
    """Raises ModelConfigError if the config has a sliding window."""
    if (window := fields.given("sliding_window")) is not None:
        raise ModelConfigError(f"config field sliding_window is {window!r}: only attention to everything is supported")


def weights(spelt: Mapping[str, Spelling]) -> dict[str, HFSource]:
    """Returns the weights of parts, by ours and the checkpoint's names of the parts."""
    return {f"{ours}.weight": tensor(*(f"{one}.weight" for one in _each(theirs))) for ours, theirs in spelt.items()}


def named(
    parameters: Iterable[str], spelt: Mapping[str, Spelling] = {}, shapes: Mapping[str, tuple[int, ...]] = {}
) -> dict[str, HFSource]:
    """Returns parameters that are one tensor each.

    Args:
        parameters: our paths.
        spelt: the checkpoint's names of parameters, or of the modules that they belong to, where they are not ours.
        shapes: those of tensors in the checkpoint, by our paths, where they are not the parameters'.
    """
    spelt, sources = {"a_log": "A_log", "d": "D", **spelt}, {}
    for path in parameters:
        module, dot, name = path.rpartition(".")
        modules = () if path in spelt else _each(spelt.get(module, module))
        names = [f"{one}{dot}{name}" for one in modules] or _each(spelt[path])
        sources[path] = tensor(*names, shape=shapes.get(path))
    return sources


def consecutive(
    name: str, sizes: Mapping[str, int], *inputs: int, pieces: int = 1, bias: bool = False
) -> dict[str, HFSource]:
    """Returns parts that are rows of one tensor, one part after the other: the number of rows of each, by our name.

    Args:
        inputs: the other axes.
        pieces: the tensor consists of this many equal pieces, each of which has rows of all parts.
        bias: there is also one, of the same rows.
    """
    sources, start, whole = {}, 0, pieces * sum(sizes.values())
    for part, size in sizes.items():
        for kind, shape in (("weight", (whole, *inputs)), *([("bias", (whole,))] if bias else [])):
            rows = start, start + size
            sources[f"{part}.{kind}"] = tensor(f"{name}.{kind}", rows=rows, shape=shape, pieces=pieces)
        start += size
    return sources


def mamba(config: MambaConfig, hidden: int) -> dict[str, HFSource]:
    """Returns a Mamba2 mixer. The rows of in_proj are z, x, B, C, dt; the channels of conv1d are x, B, C."""
    inner, group = config.inner_size, config.key_size
    projected = {"in_proj_zx": 2 * inner, "in_proj_bc": 2 * group, "in_proj_dt": config.num_heads}
    convolved = {"conv_x": inner, "conv_bc": 2 * group}
    sources = named(config.parameters()) | consecutive("in_proj", projected, hidden, bias=config.in_bias)
    return sources | consecutive("conv1d", convolved, 1, config.conv_width, bias=config.conv_bias)


def mamba1(config: Mamba1Config, hidden: int) -> dict[str, HFSource]:
    """A Mamba-1 mixer. The rows of in_proj are x, z; norms of B, C and step sizes are named as Jamba has them."""
    inner = config.channels
    shapes = {"in_proj.weight": (2 * inner, hidden), "in_proj.bias": (2 * inner,)}
    shapes["conv.weight"] = inner, 1, config.conv_width
    norms = {f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return named(config.parameters(), {"conv": "conv1d", **norms}, shapes)


def attention(config: AttentionConfig, hidden: int, spelt: Mapping[str, Spelling] = {}) -> dict[str, HFSource]:
    """Returns attention with separate projections. `spelt`: parts that the checkpoint calls otherwise."""
    sources = named(config.parameters(), {"gate_proj": ("gate_proj", "g_proj"), **spelt})
    for part in ("k", "v") if config.kv_scales else ():
        names = (f"{part}_proj.{part}_scale", f"{part}_scale", f"attn.{part}_scale")
        sources[f"{part}_scale"] = replace(tensor(*names, shape=()), default=1.0)
    return sources


def latent_attention(config: LatentAttentionConfig, hidden: int, output: Spelling = "o_proj") -> dict[str, HFSource]:
    """Attention over latents. Of kv_b_proj, each head has the rows of its keys, then those of its values."""
    spelt: dict[str, Spelling] = {"latent_proj": "kv_a_proj_with_mqa", "norm": "kv_a_layernorm", "o_proj": output}
    spelt |= {"q_latent_proj": "q_a_proj", "q_norm": "q_a_layernorm", "gate_proj": "g_proj"}
    spelt |= {"q_proj": "q_b_proj"} if config.query_latent_size else {}
    of_head = {"k_up": config.key_size, "v_up": config.value_size}
    rows = consecutive("kv_b_proj", of_head, config.latent_size, pieces=config.num_heads)
    return named(config.parameters(), spelt) | rows


def mlp(config: MLPConfig, hidden: int, names: Sequence[str] = MLP_NAMES) -> dict[str, HFSource]:
    """Returns an MLP with separate projections; `names` are those of gate, up and down."""
    return named(config.parameters(), dict(zip(MLP_NAMES, names, strict=True)))


def moe(
    config: MoEConfig,
    hidden: int,
    *,
    router: str = "gate",
    correction: str = "",
    shared: str = "",
    shared_gate: str = "",
    names: Sequence[str] = MLP_NAMES,
) -> dict[str, HFSource]:
    """A router and experts: one by one, or (as in transformers' modules) together.

    Args:
        router: the checkpoint's name, as of the other parts.
        correction: of the router's correction bias.
        names: of an expert's gate, up and down projection.
    """
    size, inputs = config.intermediate_size, config.latent_size or hidden
    spelt = {"router": router, "router.correction_bias": correction, "shared_gate": shared_gate}
    spelt |= {"latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj"}
    sources = named(config.parameters(), spelt | {f"shared.{part}": f"{shared}.{part}" for part in MLP_NAMES})
    together = "gate_up_proj", (config.num_experts, 2 * size, inputs)
    for part, own, (joined, shape) in (
        ("up", names[:2] if config.gated else names[1:2], together if config.gated else ("up_proj", None)),
        ("down", names[2:], ("down_proj", None)),
    ):
        each = tuple(f"experts.{e}.{one}.weight" for e in range(config.num_experts) for one in own)
        stored = (size, inputs) if part == "up" and config.gated else None
        alternatives = (tensor(f"experts.{joined}", shape=shape),)
        sources[f"experts.{part}"] = HFSource(each, stored_shape=stored, stack=True, alternatives=alternatives)
    return sources


def layers(
    config: HybridConfig,
    mixers: Mixers,
    norms: Sequence[Spelling] = ("input_layernorm", "post_attention_layernorm"),
    *,
    pattern: str | None = None,
    path: str = "blocks",
    name: str = "layers",
    first: int = 0,
    norms_after: Sequence[Spelling] = (),
    output_norms: Sequence[Spelling] = (),
) -> dict[str, HFSource]:
    """Returns sublayers, one or several of which are a layer in the checkpoint.

    Args:
        norms: the norm of each sublayer of a layer.
        pattern: the sublayers; None: the model's.
        path: our path of all sublayers; `name` is the checkpoint's name of all layers, and `first` the number of the
            first one.
        norms_after: instead of `norms`, of sublayers in `HybridConfig.norm_after`.
        output_norms: with `HybridConfig.norm_both`.
    """
    sources: dict[str, HFSource] = {}
    for i, kind in enumerate(config.pattern if pattern is None else pattern):
        layer, place = f"{name}.{first + i // len(norms)}.", i % len(norms)
        found = {"norm": norms_after[place] if pattern is None and i in config.norm_after else norms[place]}
        found |= {"output_norm": output_norms[place]} if config.norm_both and output_norms else {}
        mixer, names = mixers[kind]
        prefixes = [f"{layer}{one}." if one else layer for one in _each(mixer)]
        sources |= placed(f"{path}.{i}", weights(found), layer)
        sources |= placed(f"{path}.{i}.mixer", names(config.mixer(kind), config.hidden_size), *prefixes)
    return sources


def whole_model(
    config: HybridConfig,
    body: Mapping[str, HFSource],
    *,
    embed: Spelling = "embed_tokens.weight",
    norm: str = "norm.weight",
    prefixes: Sequence[str] = ("model.",),
) -> dict[str, HFSource]:
    """Adds the embedding, the final norm, and the head unless it is tied to the embedding.

    Names of the body have no prefix yet: the file may use any of `prefixes`. The head never has a prefix.
    """
    sources = with_prefix({**body, "embed.weight": tensor(*_each(embed)), "final_norm.weight": tensor(norm)}, *prefixes)
    return sources if config.tie_word_embeddings else sources | {"lm_head.weight": tensor("lm_head.weight")}


_USUAL: Mapping[str, Names] = {
    MAMBA: mamba, MAMBA1: mamba1, ATTENTION: attention, WINDOWED: attention, LATENT: latent_attention, MLP: mlp,
    MOE: moe,
}  # fmt: skip


def mixers(family: str, own: Mapping[str, Names] = {}) -> Mixers:
    """Returns the mixers of a family in `PUBLISHED`. `own`: the names of parameters that are not the usual ones, by the
    kind of sublayer."""
    found, names = {}, {**_USUAL, **own}
    for kind, entry in PUBLISHED[family]["mixers"].items():
        options = dict(entry) if isinstance(entry, dict) else {"in": entry}
        found[kind] = options.pop("in"), partial(names[kind], **options)
    return found


WeightNames = Callable[[HybridConfig], dict[str, HFSource]]


def naming(family: str, own: Mapping[str, Names] = {}) -> WeightNames:
    """Returns `Family.weight_names` of a family whose names are all in `PUBLISHED` or in `own`; see `mixers`."""
    known, table = mixers(family, own), {"layers": {}, "model": {}} | PUBLISHED[family]
    return lambda config: whole_model(config, layers(config, known, **table["layers"]), **table["model"])


def family(
    name: str,
    model_types: tuple[str, ...],
    read: Callable[[Fields], HybridConfig],
    names: Mapping[str, Names] | WeightNames = MappingProxyType({}),
    ignored: Callable[[HybridConfig], tuple[str, ...]] = lambda config: (),
) -> Family:
    """Returns a family in `PUBLISHED`. `names` is `Family.weight_names`, or what `naming` takes for it."""
    weight_names = naming(name, names) if isinstance(names, Mapping) else names
    return Family(name, model_types, lambda raw: read(Fields.of(raw, name)), weight_names, ignored)


def _each(spelling: Spelling) -> tuple[str, ...]:
    return (spelling,) if isinstance(spelling, str) else tuple(spelling)
