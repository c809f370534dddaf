"""The division of each parameter over devices: as mixers declare it, and for the parts around them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from kernels_pallas.quantized import PARTS
from mamba_jax.config import (
    SHARED,
    WHOLE,
    AttentionConfig,
    Division,
    HybridConfig,
    MLPConfig,
    Placement,
    SharedConfig,
    UnevenDivision,
    need,
)
from mamba_jax.config.declaration import declared


@lru_cache(maxsize=64)
def placements(config: HybridConfig) -> Mapping[str, Placement]:
    """Returns every parameter of a model (see `mamba_jax.model.parameters`), by its dotted path."""
    table = Division(0, config.vocab_size, "words", otherwise=UnevenDivision.KEEP_WHOLE)
    tied = config.tie_word_embeddings
    found = declared((table, "embed.weight"), (WHOLE, "final_norm.weight"), (table, "lm_head.weight", not tied))
    found |= _sublayers("blocks", config, config.pattern, before="")
    if config.shared is not None:
        parts = (need(config.attention), "attention"), (need(config.mlp), "mlp")
        block = declared(*((WHOLE, f"{name}_norm.weight") for _, name in parts))
        for mixer, name in parts:
            block |= _under(name, mixer.parameters())
        for index in range(config.shared.num_blocks):
            found |= _under(f"shared.{index}", block)
    if config.mtp_pattern:
        frame = declared(
            (WHOLE, "enorm.weight hnorm.weight final_norm.weight"),
            (table, "embed.weight", config.own_mtp_embedding),
            (table, "lm_head.weight", config.own_mtp_head),
        )
        found |= _under("mtp", frame | _under("eh_proj", of_whole_input(config)))
        found |= _sublayers("mtp.blocks", config, config.mtp_pattern, before=config.pattern)
    if config.drafter is not None:
        found |= _under("drafter", config.drafter.parameters(config.vocab_size))
    return MappingProxyType(found)


def placement(found: Mapping[str, Placement], path: str) -> Placement | None:
    """That of a parameter, of a part of a quantized weight or of a layer's adapters; None if nothing declares it."""
    if path in found:
        return found[path]
    owner, _, part = path.rpartition(".")
    if part in PARTS and owner in found:
        return _of_part(found[owner], part)
    layer, _, lora = owner.rpartition(".")
    weight = found.get(f"{layer}.weight" if layer else "weight")
    if lora.startswith("lora_") and (of_experts := f"{layer}.{lora.removeprefix('lora_')}") in found:
        return _of_expert_lora(found[of_experts], part)
    return None if lora != "lora" or weight is None else _of_lora(weight, part)


def _of_expert_lora(weight: Placement, part: str) -> Placement:
    """That of `ExpertLoRA.a` or `ExpertLoRA.b`: the first axis is that of experts."""
    if not isinstance(weight, Division) or weight.axis != 0:
        return _of_lora(weight, part, inputs=3)
    otherwise = weight.otherwise
    if isinstance(otherwise, Division):
        found = _of_lora(otherwise, part, inputs=3)
        otherwise = found if isinstance(found, Division) else UnevenDivision.KEEP_WHOLE
    return replace(weight, otherwise=otherwise)


def _of_lora(weight: Placement, part: str, *, inputs: int = 2) -> Placement:
    """That of `LoRA.a`, `LoRA.b` or `LoRA.factor`: their axes of inputs or outputs are divided as the weight's are.

    `inputs`: the axis of inputs of `a`.
    """
    if not isinstance(weight, Division):
        return weight
    divides_inputs = weight.axis == weight.rank - 1
    if part in ("b", "factor"):  # [*outputs, entries, rank] and [*outputs, entries]
        return WHOLE if divides_inputs else weight
    return replace(weight, axis=inputs) if divides_inputs else WHOLE  # [entries, rank, inputs]


def _of_part(weight: Placement, part: str) -> Placement:
    """Of an array of a quantized weight: scales are divided along with the values that they belong to."""
    if not isinstance(weight, Division) or part == "values":
        return weight
    otherwise = weight.otherwise
    if isinstance(otherwise, Division):
        found = _of_part(otherwise, part)
        otherwise = found if isinstance(found, Division) else UnevenDivision.KEEP_WHOLE
    outputs, inputs = weight.rank - 2, weight.rank - 1
    if part in ("channel_scale", "input_scale"):  # [*lead, outputs]
        return WHOLE if weight.axis == inputs else replace(weight, otherwise=otherwise)
    swapped = {outputs: inputs, inputs: outputs}  # [*lead, groups, outputs]
    return replace(weight, axis=swapped.get(weight.axis, weight.axis), otherwise=otherwise)


def mixer_placements(config: HybridConfig, kind: str, index: int) -> Mapping[str, Placement]:
    """The parameters of one sublayer's mixer, by their paths from it on. `index` counts the sublayers of this kind."""
    if kind == SHARED:
        return need(config.mamba).parameters()
    return config.mixer(kind).at(index).parameters()


def of_whole_input(config: HybridConfig) -> dict[str, Placement]:
    """Returns a product of an input that is whole: each device takes a piece of it."""
    return {"weight": Division(1, config.hidden_size, "hidden channels")}


def adapter_placements(shared: SharedConfig, attention: AttentionConfig, mlp: MLPConfig) -> dict[str, Placement]:
    """What one use of a shared block adds to the block's projections."""
    attends, kv_heads = shared.attention_adapters, attention.kv_heads(0, UnevenDivision.SHARE)
    return declared(
        (WHOLE, "gate_up.down.weight"),
        (Division(1, mlp.size(0), "MLP channels", rank=3), "gate_up.up.weight"),
        (WHOLE, "q.down.weight k.down.weight v.down.weight", attends),
        (attention.heads(0), "q.up.weight", attends),
        (kv_heads, "k.up.weight v.up.weight", attends),
    )


def _sublayers(path: str, config: HybridConfig, pattern: str, *, before: str) -> dict[str, Placement]:
    found: dict[str, Placement] = {}
    for i, kind in enumerate(pattern):
        norms = declared((WHOLE, "norm.weight"), (WHOLE, "output_norm.weight", config.norm_both))
        found |= _under(f"{path}.{i}", norms)
        index = (before + pattern[:i]).count(kind)
        found |= _under(f"{path}.{i}.mixer", mixer_placements(config, kind, index))
        if kind == SHARED:
            adapters = adapter_placements(need(config.shared), need(config.attention), need(config.mlp))
            found |= _under(f"{path}.{i}.linear", of_whole_input(config))
            found |= _under(f"{path}.{i}.adapters", adapters)
    return found


def _under(path: str, found: Mapping[str, Placement]) -> dict[str, Placement]:
    return {f"{path}.{name}": placement for name, placement in found.items()}
