"""Names of our modules' parameters in Hugging Face checkpoints that several families share."""

from __future__ import annotations

import math
from dataclasses import replace

from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig, ModelConfigError, MoEConfig
from mamba_jax.config.mamba1 import Mamba1Config
from mamba_jax.families.base import HFSource, tensor, with_prefix
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

OWN_DRAFT_EMBEDDING, OWN_DRAFT_HEAD = "mtp.embed.weight", "mtp.lm_head.weight"


def mamba_config(fields: Fields, hidden: int, eps: float, *, inner_size: int | None = None) -> MambaConfig:
    """Reads a Mamba2 mixer from fields that Bamba introduced. The inner width is `inner_size` or expand * hidden."""
    heads = fields.integer("mamba_n_heads", 128)
    inner = int(fields.number("mamba_expand", 2) * hidden) if inner_size is None else inner_size
    automatic = fields.given("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if automatic else fields.integer("mamba_d_head", 0)
    if heads * head_dim != inner:
        raise ModelConfigError(f"{heads} Mamba heads of {head_dim} do not make the inner width {inner}")
    bias = fields.flag("mamba_proj_bias", False)
    low, high = fields.numbers("time_step_limit", (0.0, math.inf))
    return MambaConfig(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        num_groups=fields.integer("mamba_n_groups", 1),
        conv_width=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_limit=(low, high),
        norm_eps=eps,
    )


def dt_rank(fields: Fields, name: str, hidden: int) -> int:
    """Returns the rank of Mamba-1's step size projection; if absent or "auto", a sixteenth of the hidden size."""
    automatic = fields.given(name) in (None, "auto")
    return -(-hidden // 16) if automatic else fields.integer(name, 0)


def attention_config(
    fields: Fields,
    hidden: int,
    *,
    num_heads: int,
    num_kv_heads: int | None,
    scale: float | None = None,
    rope: bool = True,
    rope_share: float | None = None,
) -> AttentionConfig:
    """Reads attention from the usual fields. Head counts are defaults; `scale` is 1 / sqrt(head_dim) if None."""
    heads = fields.integer("num_attention_heads", num_heads)
    if heads < 1:
        raise ModelConfigError(f"config field num_attention_heads is {heads}: at least 1 is expected")
    head_dim = fields.integer("head_dim", hidden // heads)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.key_value_heads(heads, num_kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        input_size=hidden,
        bias=fields.flag("attention_bias", False),
        rope=rope_config(fields, head_dim, share=rope_share) if rope else None,
    )


def linear(path: str, name: str, *, bias: bool = False) -> dict[str, HFSource]:
    """Returns a dense layer stored under `name`."""
    sources = {f"{path}.weight": tensor(f"{name}.weight")}
    if bias:
        sources[f"{path}.bias"] = tensor(f"{name}.bias")
    return sources


def mamba(path: str, name: str, config: MambaConfig, hidden_size: int) -> dict[str, HFSource]:
    """Returns a Mamba2 mixer. The rows of in_proj are z, x, B, C, dt; the channels of conv1d are x, B, C."""
    inner, group, heads = config.inner_size, config.group_size, config.num_heads
    channels, width = inner + 2 * group, config.conv_width
    bc, dt, end = 2 * inner, 2 * inner + 2 * group, 2 * inner + 2 * group + heads
    sources = {}
    for part, rows in (("zx", (0, bc)), ("bc", (bc, dt)), ("dt", (dt, end))):
        weight = tensor(f"{name}.in_proj.weight", rows=rows, shape=(end, hidden_size))
        sources[f"{path}.in_proj_{part}.weight"] = weight
        if config.in_bias:
            sources[f"{path}.in_proj_{part}.bias"] = tensor(f"{name}.in_proj.bias", rows=rows, shape=(end,))
    for part, rows in (("x", (0, inner)), ("bc", (inner, channels))):
        weight = tensor(f"{name}.conv1d.weight", rows=rows, shape=(channels, 1, width))
        sources[f"{path}.conv_{part}.weight"] = weight
        if config.conv_bias:
            sources[f"{path}.conv_{part}.bias"] = tensor(f"{name}.conv1d.bias", rows=rows, shape=(channels,))
    sources[f"{path}.dt_bias"] = tensor(f"{name}.dt_bias")
    sources[f"{path}.a_log"] = tensor(f"{name}.A_log")
    sources[f"{path}.d"] = tensor(f"{name}.D")
    if config.norm:
        sources[f"{path}.norm.weight"] = tensor(f"{name}.norm.weight")
    return sources | linear(f"{path}.out_proj", f"{name}.out_proj", bias=config.out_bias)


def mamba1(path: str, name: str, config: Mamba1Config, hidden_size: int) -> dict[str, HFSource]:
    """A Mamba-1 mixer. The rows of in_proj are x, z; norms of B, C and step sizes are named as Jamba has them."""
    inner = config.channels
    sources = {f"{path}.in_proj.weight": tensor(f"{name}.in_proj.weight", shape=(2 * inner, hidden_size))}
    if config.bias:
        sources[f"{path}.in_proj.bias"] = tensor(f"{name}.in_proj.bias", shape=(2 * inner,))
    sources[f"{path}.conv.weight"] = tensor(f"{name}.conv1d.weight", shape=(inner, 1, config.conv_width))
    if config.conv_bias:
        sources[f"{path}.conv.bias"] = tensor(f"{name}.conv1d.bias")
    sources |= {f"{path}.a_log": tensor(f"{name}.A_log"), f"{path}.d": tensor(f"{name}.D")}
    for part in ("dt", "b", "c") if config.norm_weights else ():
        sources[f"{path}.{part}_norm.weight"] = tensor(f"{name}.{part}_layernorm.weight")
    sources |= linear(f"{path}.x_proj", f"{name}.x_proj") | linear(f"{path}.dt_proj", f"{name}.dt_proj", bias=True)
    return sources | linear(f"{path}.out_proj", f"{name}.out_proj", bias=config.bias)


def attention(path: str, name: str, config: AttentionConfig) -> dict[str, HFSource]:
    """Attention with separate q, k, v and o projections, and norms of q and k if it has them."""
    sources: dict[str, HFSource] = {}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = config.bias or (config.output_bias and part == "o_proj")
        sources |= linear(f"{path}.{part}", f"{name}.{part}", bias=bias)
    if config.head_gate:
        sources[f"{path}.gate_proj.weight"] = tensor(f"{name}.gate_proj.weight", f"{name}.g_proj.weight")
    for part in ("k", "v") if config.kv_scales else ():
        names = (f"{name}.{part}_proj.{part}_scale", f"{name}.{part}_scale", f"{name}.attn.{part}_scale")
        sources[f"{path}.{part}_scale"] = replace(tensor(*names, shape=()), default=1.0)
    for part in ("q_norm", "k_norm") if config.qk_norm else ():
        sources[f"{path}.{part}.weight"] = tensor(f"{name}.{part}.weight")
    return sources


def mlp(path: str, name: str, *, gated: bool, bias: bool) -> dict[str, HFSource]:
    """Returns an MLP with separate projections."""
    sources: dict[str, HFSource] = {}
    for part in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
        sources |= linear(f"{path}.{part}", f"{name}.{part}", bias=bias)
    return sources


def fused_gate_up(path: str, name: str, size: int, inputs: int, *, bias: bool = False) -> dict[str, HFSource]:
    """Gate and up of an MLP, stored as the two halves of one dense layer."""
    sources = {}
    for part, rows in (("gate_proj", (0, size)), ("up_proj", (size, 2 * size))):
        sources[f"{path}.{part}.weight"] = tensor(f"{name}.weight", rows=rows, shape=(2 * size, inputs))
        if bias:
            sources[f"{path}.{part}.bias"] = tensor(f"{name}.bias", rows=rows, shape=(2 * size,))
    return sources


def experts(
    path: str,
    published: str,
    module: str,
    config: MoEConfig,
    hidden: int,
    names: tuple[str, str, str] = ("w1", "w3", "w2"),
) -> dict[str, HFSource]:
    """Gated experts: one by one under `published`, or (transformers) together under `module`.

    `names` are those of an expert's gate, up and down projection; the default are Mixtral's.
    """
    size, numbers = config.intermediate_size, range(config.num_experts)
    each = tuple(f"{published}.experts.{e}.{part}.weight" for e in numbers for part in names[:2])
    together = tensor(f"{module}.experts.gate_up_proj", shape=(config.num_experts, 2 * size, hidden))
    down = tuple(f"{published}.experts.{e}.{names[2]}.weight" for e in numbers)
    return {
        f"{path}.experts.up": HFSource(each, stored_shape=(size, hidden), stack=True, alternatives=(together,)),
        f"{path}.experts.down": HFSource(down, stack=True, alternatives=(tensor(f"{module}.experts.down_proj"),)),
    }


def whole_model(
    config: HybridConfig, body: dict[str, HFSource], *, embed: str, norm: str, prefixes: tuple[str, ...]
) -> dict[str, HFSource]:
    """Adds the embedding, the final norm, and the head unless it is tied to the embedding.

    Names of the body have no prefix yet: the file may use any of `prefixes`. The head never has a prefix.
    """
    body = body | {"embed.weight": tensor(embed), "final_norm.weight": tensor(norm)}
    sources = with_prefix(body, *prefixes)
    if not config.tie_word_embeddings:
        sources["lm_head.weight"] = tensor("lm_head.weight")
    return sources


def draft_layer_frame(config: HybridConfig) -> dict[str, HFSource]:
    """Returns the multi-token-prediction layer's parameters before and after its sublayers."""
    last = len(config.mtp_pattern) - 1
    sources = {"mtp.final_norm.weight": tensor(f"mtp.layers.{last}.final_layernorm.weight")}
    for part in ("enorm", "hnorm", "eh_proj"):
        sources[f"mtp.{part}.weight"] = tensor(f"mtp.layers.0.{part}.weight")
    return sources


def own_draft_tables(config: HybridConfig) -> dict[str, HFSource]:
    """Embedding and head of the multi-token-prediction layer, where it has its own."""
    sources = {}
    if config.own_mtp_embedding:
        sources[OWN_DRAFT_EMBEDDING] = tensor("mtp.embeddings.weight", "mtp.embed_tokens.weight")
    if config.own_mtp_head:
        sources[OWN_DRAFT_HEAD] = tensor("mtp.lm_head.weight")
    return sources


def always_ignored(config: HybridConfig) -> tuple[str, ...]:
    """Returns patterns of redundant tensors: rotation tables, and a head that the config ties to the embedding."""
    tied = (r"lm_head\.weight",) if config.tie_word_embeddings else ()
    return (r".*\.rotary_emb\.inv_freq", *tied)
