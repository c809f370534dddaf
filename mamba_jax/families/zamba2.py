"""Zamba2 (Zyphra, 2024): Mamba2 layers, some of which also take the output of a shared transformer block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mamba_jax.config import (
    MAMBA,
    SHARED,
    AttentionConfig,
    HybridConfig,
    MambaConfig,
    MLPConfig,
    ModelConfigError,
    SharedConfig,
    need,
)
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "hybrid": SHARED}
_DEFAULT_PATTERN = "M" + "MMMMMZ" * 7 + "MMMMZ" + "MMMZ" + "MM"
_GATED_NORM_EPS = 1e-5  # independent of rms_norm_eps


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `Zamba2Config`. As for Nemotron-H, step sizes are not limited."""
    fields = Fields(raw)
    hidden, heads = fields.integer("hidden_size", 2560), fields.integer("num_attention_heads", 32)
    pattern = fields.layers(_KINDS, "layers_block_type", "layer_types")
    if pattern is None:
        pattern = _DEFAULT_PATTERN
    inner, mamba_heads = int(fields.number("mamba_expand", 2) * hidden), fields.integer("n_mamba_heads", 8)
    if inner % mamba_heads or (2 * hidden) % heads:
        raise ModelConfigError(
            f"{inner} Mamba channels in {mamba_heads} heads, or {2 * hidden} attention channels in {heads}"
        )
    head_dim, bias = 2 * hidden // heads, fields.flag("add_bias_linear", False)
    uses, blocks = pattern.count(SHARED), fields.integer("num_mem_blocks", 1)
    tied = fields.flag("tie_word_embeddings", True)
    long = fields.flag("use_long_context", False)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        pattern=pattern,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        mamba=MambaConfig(
            num_heads=mamba_heads,
            head_dim=inner // mamba_heads,
            state_size=fields.integer("mamba_d_state", 64),
            num_groups=fields.integer("mamba_ngroups", 1),
            conv_width=fields.integer("mamba_d_conv", 4),
            in_bias=bias,
            out_bias=bias,
            norm_eps=_GATED_NORM_EPS,
        ),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.key_value_heads(heads, None),
            head_dim=head_dim,
            scale=(head_dim / 2) ** -0.5,
            input_size=2 * hidden,
            rope=rope_config(fields, head_dim) if fields.flag("use_mem_rope", False) else None,
        ),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 4 * hidden) or 4 * hidden,
            fields.text("hidden_act", "gelu"),
            gated=True,
            bias=bias,
        ),
        shared=SharedConfig(
            # In transformers, "tie" applies to blocks as well as the head: if untied, every use has its own block.
            num_blocks=min(blocks, uses) if tied else uses,
            adapter_rank=fields.integer("adapter_rank", 128),
            attention_adapters=fields.flag("use_shared_attention_adapter", False),
        )
        if uses
        else None,
        tie_word_embeddings=tied,
        max_position_embeddings=16384 if long else fields.integer("max_position_embeddings", 4096),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Zamba2ForCausalLM` has them.

    A shared block is stored in the layer that uses it first, with the adapters of all its uses (numbered over all
    hybrid layers). In checkpoints that repeat the block, or keep it elsewhere, it is found in any layer that uses it.
    """
    body: dict[str, HFSource] = {}
    use = 0
    for i, kind in enumerate(config.pattern):
        path, name = f"blocks.{i}", f"layers.{i}"
        if kind == SHARED:
            body |= parts.linear(f"{path}.linear", f"{name}.linear")
            body |= _in_any(_users(config, use), partial(_adapters, config, f"{path}.adapters", use))
            name, use = f"{name}.mamba_decoder", use + 1
        body[f"{path}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body |= parts.mamba(f"{path}.mixer", f"{name}.mamba", need(config.mamba), config.hidden_size)
    for block in range(config.shared.num_blocks if config.shared else 0):
        body |= _in_any(_users(config, block), partial(_block, config, f"shared.{block}"))
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="final_layernorm.weight", prefixes=("model.", "backbone.")
    )


def _users(config: HybridConfig, use: int) -> list[int]:
    """Returns the layers that use the same block as the hybrid layer number `use`: every `num_blocks`th one."""
    hybrid, blocks = [i for i, kind in enumerate(config.pattern) if kind == SHARED], need(config.shared).num_blocks
    return hybrid[use % blocks :: blocks]


def _in_any(layers: list[int], sources_at: Callable[[str], dict[str, HFSource]]) -> dict[str, HFSource]:
    """Returns the sources in the first of these layers, with the others as alternatives."""
    first, *rest = [sources_at(f"layers.{layer}.shared_transformer") for layer in layers]
    return {
        path: dataclasses.replace(source, alternatives=tuple(other[path] for other in rest))
        for path, source in first.items()
    }


def _block(config: HybridConfig, path: str, name: str) -> dict[str, HFSource]:
    mlp, bias, size = f"{name}.feed_forward", need(config.mlp).bias, need(config.mlp).size(0)
    return {
        f"{path}.attention_norm.weight": tensor(f"{name}.input_layernorm.weight"),
        f"{path}.mlp_norm.weight": tensor(f"{name}.pre_ff_layernorm.weight"),
        **parts.attention(f"{path}.attention", f"{name}.self_attn", need(config.attention)),
        **parts.fused_gate_up(f"{path}.mlp", f"{mlp}.gate_up_proj", size, config.hidden_size, bias=bias),
        **parts.linear(f"{path}.mlp.down_proj", f"{mlp}.down_proj", bias=bias),
    }


def _adapters(config: HybridConfig, path: str, use: int, name: str) -> dict[str, HFSource]:
    shared = need(config.shared)
    fused = (2 * need(config.mlp).size(0), shared.adapter_rank)
    gate_up = f"{name}.feed_forward.gate_up_proj_adapter_list.{use}"
    sources = {
        f"{path}.gate_up.down.weight": tensor(f"{gate_up}.0.weight"),
        f"{path}.gate_up.up.weight": tensor(f"{gate_up}.1.weight", shape=fused),
    }
    for part in "qkv" if shared.attention_adapters else "":
        adapter = f"{name}.self_attn.linear_{part}_adapter_list.{use}"
        sources[f"{path}.{part}.down.weight"] = tensor(f"{adapter}.0.weight")
        sources[f"{path}.{part}.up.weight"] = tensor(f"{adapter}.1.weight")
    return sources


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """Also ignores shared blocks repeated in later layers, and untied blocks' adapters of other uses."""
    blocks = config.shared.num_blocks if config.shared else 0
    again = [i for i, kind in enumerate(config.pattern) if kind == SHARED][blocks:]
    repeated = (rf"(model|backbone)\.layers\.({'|'.join(map(str, again))})\.shared_transformer\..*",) if again else ()
    adapters = r"(model|backbone)\.layers\.\d+\.shared_transformer\..*_adapter_list\..*"
    return (*parts.always_ignored(config), *repeated, adapters)


FAMILY = Family(
    name="Zamba2",
    model_types=("zamba2",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=_ignored,
)
