"""Zamba2 (Zyphra, 2024): Mamba2 layers, some of which also take the output of a shared transformer block."""

from dataclasses import replace
from typing import Any

from mamba_jax.config import (
    MAMBA,
    SHARED,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    ModelConfigError,
    SharedConfig,
    need,
)
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource, placed, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "hybrid": SHARED}
_DEFAULT_PATTERN = "M" + "MMMMMZ" * 7 + "MMMMZ" + "MMMZ" + "MM"
_GATED_NORM_EPS = 1e-5  # independent of rms_norm_eps


def config_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `Zamba2Config`. As for Nemotron-H, step sizes are not limited."""
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    heads = fields.integer("num_attention_heads")
    pattern = fields.layers(_KINDS, "layers_block_type", "layer_types")
    pattern = _DEFAULT_PATTERN if pattern is None else pattern
    inner, mamba_heads = int(fields.number("mamba_expand", 2) * hidden), fields.integer("n_mamba_heads")
    if inner % mamba_heads or (2 * hidden) % heads:
        raise ModelConfigError(
            f"{inner} Mamba channels in {mamba_heads} heads, or {2 * hidden} attention channels in {heads}"
        )
    head_dim, bias = 2 * hidden // heads, fields.flag("add_bias_linear", False)
    sizes: dict[str, Any] = {"heads": mamba_heads, "head_dim": inner // mamba_heads}
    mamba = parts.mamba_config(fields, _GATED_NORM_EPS, **sizes, bias=bias, limited=False)
    uses, blocks = pattern.count(SHARED), fields.integer("num_mem_blocks")
    tied = fields.flag("tie_word_embeddings")
    return HybridConfig(
        **parts.common_fields(fields, FAMILY.name, hidden, eps, silu=None)
        | ({"max_position_embeddings": 16384} if fields.flag("use_long_context", False) else {}),
        pattern=pattern,
        mamba=replace(mamba, conv_bias=True),  # whatever use_conv_bias says
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.key_value_heads(heads),
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            input_size=2 * hidden,
            rope=rope_config(fields, head_dim) if fields.flag("use_mem_rope", False) else None,
        ),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 4 * hidden) or 4 * hidden,
            fields.text("hidden_act"),
            gated=True,
            bias=bias,
        ),
        shared=SharedConfig(
            # In transformers, "tie" applies to blocks as well as the head: if untied, every use has its own block.
            num_blocks=min(blocks, uses) if tied else uses,
            adapter_rank=fields.integer("adapter_rank"),
            attention_adapters=fields.flag("use_shared_attention_adapter", False),
        )
        if uses
        else None,
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Zamba2ForCausalLM` has them.

    A shared block is stored in the layer that uses it first, with the adapters of all its uses (numbered over all
    hybrid layers). In checkpoints that repeat the block, or keep it elsewhere, it is found in any layer that uses it.
    """
    body, use = dict[str, HFSource](), 0
    for i, kind in enumerate(config.pattern):
        path, name = f"blocks.{i}", f"layers.{i}."
        if kind == SHARED:
            body |= placed(path, parts.weights({"linear": "linear"}), name)
            body |= _in_any(_users(config, use), f"{path}.adapters", _adapters(config, use))
            name, use = f"{name}mamba_decoder.", use + 1
        body |= placed(path, parts.weights({"norm": "input_layernorm"}), name)
        body |= placed(f"{path}.mixer", parts.mamba(need(config.mamba), config.hidden_size), f"{name}mamba.")
    for block in range(config.shared.num_blocks if config.shared else 0):
        body |= _in_any(_users(config, block), f"shared.{block}", _block(config))
    return parts.whole_model(config, body, norm="final_layernorm.weight", prefixes=("model.", "backbone."))


def _users(config: HybridConfig, use: int) -> list[int]:
    """Returns the layers that use the same block as the hybrid layer number `use`: every `num_blocks`th one."""
    hybrid, blocks = [i for i, kind in enumerate(config.pattern) if kind == SHARED], need(config.shared).num_blocks
    return hybrid[use % blocks :: blocks]


def _in_any(layers: list[int], path: str, sources: dict[str, HFSource]) -> dict[str, HFSource]:
    """Returns the sources in the first of these layers, with the others as alternatives."""
    return placed(path, sources, *(f"layers.{layer}.shared_transformer." for layer in layers))


def _block(config: HybridConfig) -> dict[str, HFSource]:
    mlp, hidden = need(config.mlp), config.hidden_size
    gate_up = {"gate_proj": mlp.size(0), "up_proj": mlp.size(0)}
    fused = parts.consecutive("gate_up_proj", gate_up, hidden, bias=mlp.bias)
    return {
        **parts.weights({"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}),
        **placed("attention", parts.attention(need(config.attention), hidden), "self_attn."),
        **placed("mlp", parts.mlp(mlp, hidden) | fused, "feed_forward."),
    }


def _adapters(config: HybridConfig, use: int) -> dict[str, HFSource]:
    shared = need(config.shared)
    fused = (2 * need(config.mlp).size(0), shared.adapter_rank)
    gate_up = f"feed_forward.gate_up_proj_adapter_list.{use}"
    sources = parts.weights({"gate_up.down": f"{gate_up}.0"})
    sources["gate_up.up.weight"] = tensor(f"{gate_up}.1.weight", shape=fused)
    for part in "qkv" if shared.attention_adapters else "":
        adapter = f"self_attn.linear_{part}_adapter_list.{use}"
        sources |= parts.weights({f"{part}.down": f"{adapter}.0", f"{part}.up": f"{adapter}.1"})
    return sources


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """Returns shared blocks repeated in later layers, and untied blocks' adapters of other uses."""
    blocks = config.shared.num_blocks if config.shared else 0
    again = [i for i, kind in enumerate(config.pattern) if kind == SHARED][blocks:]
    repeated = (rf"(model|backbone)\.layers\.({'|'.join(map(str, again))})\.shared_transformer\..*",) if again else ()
    adapters = r"(model|backbone)\.layers\.\d+\.shared_transformer\..*_adapter_list\..*"
    return (*repeated, adapters)


FAMILY = parts.family("Zamba2", ("zamba2",), config_from_hf, weight_names, _ignored)
