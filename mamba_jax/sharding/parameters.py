"""How each parameter of a model is divided: what its mixers declare, and the frame around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kernels_pallas.quantised import PARTS
from mamba_jax.config import (
    MLP,
    SHARED,
    WHOLE,
    AttentionConfig,
    Division,
    HybridConfig,
    MLPConfig,
    Otherwise,
    Placement,
    SharedConfig,
    need,
)


def placements(config: HybridConfig) -> dict[str, Placement]:
    """Every parameter of a model (see `mamba_jax.model.parameters`), by its dotted path."""
    table = Division(0, config.vocab_size, "words", otherwise=Otherwise.KEEP_WHOLE)
    found: dict[str, Placement] = {"embed.weight": table, "final_norm.weight": WHOLE}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = table
    found |= _sublayers("blocks", config, config.pattern, mlps_before=0)
    if config.shared is not None:
        for index in range(config.shared.num_blocks):
            found |= _under(f"shared.{index}", _shared_block(config))
    if config.mtp_pattern:
        frame: dict[str, Placement] = dict.fromkeys(["enorm.weight", "hnorm.weight", "final_norm.weight"], WHOLE)
        frame |= _under("eh_proj", of_whole_input(config))
        frame |= {"embed.weight": table} if config.own_mtp_embedding else {}
        frame |= {"lm_head.weight": table} if config.own_mtp_head else {}
        found |= _under("mtp", frame)
        found |= _sublayers("mtp.blocks", config, config.mtp_pattern, mlps_before=config.pattern.count(MLP))
    return found


def placement(declared: Mapping[str, Placement], path: str) -> Placement | None:
    """That of one parameter, which may also be a part of a quantised weight; None if nothing declares it."""
    if path in declared:
        return declared[path]
    weight, _, part = path.rpartition(".")
    return _of_part(declared[weight], part) if part in PARTS and weight in declared else None


def _of_part(weight: Placement, part: str) -> Placement:
    """Of an array of a quantised weight: scales are divided along with the values that they belong to."""
    if not isinstance(weight, Division) or part == "values":
        return weight
    otherwise = weight.otherwise
    if isinstance(otherwise, Division):
        found = _of_part(otherwise, part)
        otherwise = found if isinstance(found, Division) else Otherwise.KEEP_WHOLE
    outputs, inputs = weight.rank - 2, weight.rank - 1
    if part in ("channel_scale", "input_scale"):  # [*lead, outputs]
        return WHOLE if weight.axis == inputs else replace(weight, otherwise=otherwise)
    swapped = {outputs: inputs, inputs: outputs}  # [*lead, groups, outputs]
    return replace(weight, axis=swapped.get(weight.axis, weight.axis), otherwise=otherwise)


def mixer_placements(config: HybridConfig, kind: str, mlp_index: int) -> Mapping[str, Placement]:
    """The parameters of one sublayer's mixer, by their paths from it on. `mlp_index` counts the model's MLPs."""
    if kind == SHARED:
        return need(config.mamba).parameters()
    mixer = config.mixer(kind)
    return mixer.parameters(mlp_index) if isinstance(mixer, MLPConfig) else mixer.parameters()


def of_whole_input(config: HybridConfig) -> dict[str, Placement]:
    """A product of an input that is whole: each device takes a piece of it."""
    return {"weight": Division(1, config.hidden_size, "hidden channels")}


def adapter_placements(shared: SharedConfig, attention: AttentionConfig, mlp: MLPConfig) -> dict[str, Placement]:
    """What one use of a shared block adds to the block's projections."""
    found: dict[str, Placement] = {
        "gate_up.down.weight": WHOLE,
        "gate_up.up.weight": Division(1, mlp.size(0), "MLP channels", rank=3),
    }
    if shared.attention_adapters:
        kv_heads = attention.kv_heads(0, Otherwise.SHARE)
        for name, division in (("q", attention.heads(0)), ("k", kv_heads), ("v", kv_heads)):
            found |= {f"{name}.down.weight": WHOLE, f"{name}.up.weight": division}
    return found


def _sublayers(path: str, config: HybridConfig, pattern: str, *, mlps_before: int) -> dict[str, Placement]:
    found: dict[str, Placement] = {}
    for i, kind in enumerate(pattern):
        found[f"{path}.{i}.norm.weight"] = WHOLE
        index = mlps_before + pattern[:i].count(MLP)
        found |= _under(f"{path}.{i}.mixer", mixer_placements(config, kind, index))
        if kind == SHARED:
            adapters = adapter_placements(need(config.shared), need(config.attention), need(config.mlp))
            found |= _under(f"{path}.{i}.linear", of_whole_input(config))
            found |= _under(f"{path}.{i}.adapters", adapters)
    return found


def _shared_block(config: HybridConfig) -> dict[str, Placement]:
    found: dict[str, Placement] = {"attention_norm.weight": WHOLE, "mlp_norm.weight": WHOLE}
    found |= _under("attention", need(config.attention).parameters())
    return found | _under("mlp", need(config.mlp).parameters())


def _under(path: str, found: Mapping[str, Placement]) -> dict[str, Placement]:
    return {f"{path}.{name}": placement for name, placement in found.items()}
