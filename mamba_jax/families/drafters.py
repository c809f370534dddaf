"""Drafters as published: their config.json, and where their checkpoints have each parameter.

EAGLE-3 checkpoints come in two forms: that of SafeAILab/EAGLE and SpecForge (`LlamaForCausalLMEagle3`, `midlayer.*`),
and that of the speculators library (`speculators_model_type`, `layers.0.*`). DFlash's is that of z-lab/dflash
(`DFlashDraftModel`), DSpark's that of deepseek-ai/DeepSpec (`Qwen3DSparkModel`): both are layers as in Qwen3.
"""

import dataclasses
import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from mamba_jax.config import ACTIVATIONS, HybridConfig, ModelConfigError, QKNormConfig
from mamba_jax.config.drafter import BlockConfig, DrafterConfig, EagleConfig
from mamba_jax.families import weight_names
from mamba_jax.families.base import HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.parts import attention_config, mlp_config

_IGNORED = ("t2d", r"(?:.*\.)?rotary_emb\.inv_freq")
_IGNORED_OF_DSPARK = (r"confidence_head\..*", "mask_embedding")
_CONFIDENCE = "confidence_head.proj"
OFFSETS = "d2t"
"""The tensor with the difference between the target's token and the draft token, for each draft token."""
_FIRST = "layers.0."
_SPELLINGS = {
    r"^final_norm\.": "norm.",
    r"^embed\.": "embed_tokens.",
    r"^tokens$": OFFSETS,
    r"^markov_before\.": "markov_head.markov_w1.",
    r"^markov_after\.": "markov_head.markov_w2.",
    r"^confidence\.": f"{_CONFIDENCE}.",
    r"^selector\.hidden\.": "candidate_selector.hidden_projection.",
    r"^selector\.before\.": "candidate_selector.predecessor_codebook.",
    r"^selector\.after\.": "candidate_selector.successor_codebook.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.mlp_norm\.": ".post_attention_layernorm.",
    r"\.attention\.": ".self_attn.",
    r"_conv\.base$": "_conv.base_kernel",
    r"_conv\.projection\.": "_conv.kernel_projection.",
}
"""A checkpoint's names of parts of paths, by regular expressions of ours."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NESTED = "transformer_layer_config"
_LAYER = re.compile(r"layers\.(\d+)\.")


def drafter_from_hf(raw: Mapping[str, Any], target: HybridConfig, available: Container[str] | None) -> DrafterConfig:
    """Reads a drafter's config.json.

    Args:
        raw: the file's contents.
        target: the model that it drafts for.
        available: the names of the checkpoint's tensors; None if there are only sizes.

    Raises:
        ModelConfigError: it is no drafter, or one for another model; or fields are wrong or not supported.
    """
    names = raw.get("architectures")
    told = [raw.get("speculators_model_type"), *(names if isinstance(names, list) else [])]
    kind = next((kind for kind in _KINDS if any(kind in str(name).lower() for name in told)), None)
    if kind is None:
        raise ModelConfigError(
            f"architectures is {names!r}: no drafter that is supported; known are {', '.join(_KINDS)} (a whole "
            "language model cannot draft)"
        )
    nested = raw.get(_NESTED)
    both = {**nested, **raw} if isinstance(nested, Mapping) else raw
    # The defaults of a Llama and of a Qwen3.
    fields = Fields(both, positions=2048 if kind == "eagle3" else 32768)
    return _KINDS[kind](fields, target, available)


def layer_places(target: HybridConfig) -> tuple[int, ...]:
    """Returns, for each layer as a checkpoint numbers them, the index of its first sublayer; then the number of
    sublayers."""
    names = weight_names(target)
    found: dict[int, int] = {}
    for index in range(len(target.pattern)):
        match = _LAYER.search(names[f"blocks.{index}.norm.weight"].names[0])
        assert match is not None
        found.setdefault(int(match[1]), index)
    return (*(found[layer] for layer in sorted(found)), len(target.pattern))


def ignored(config: DrafterConfig) -> tuple[str, ...]:
    """Regular expressions (full match) of tensors that are for training, follow from the configuration, or estimate
    which drafts are right."""
    return (*_IGNORED, *(_IGNORED_OF_DSPARK if isinstance(config, BlockConfig) and config.markov_rank else ()))


def drafter_weight_names(config: DrafterConfig) -> dict[str, HFSource]:
    """Every parameter by its dotted path in the model, and where a checkpoint has it."""
    by_block, sources = isinstance(config, BlockConfig), {}
    # The vocabulary's size does not matter to names.
    for path in config.parameters(config.vocab_size):
        name = path.replace("states_norm", "hidden_norm" if by_block else "input_norm")
        for ours, theirs in _SPELLINGS.items():
            name = re.sub(ours, theirs, name)
        others = [f"midlayer.{name.removeprefix(_FIRST)}"] if name.startswith(_FIRST) else []
        others += [name.removesuffix(".weight")] if path.startswith("selector.") else []
        sources[f"drafter.{path}"] = tensor(name, *others)
    return sources


def _eagle(fields: Fields, target: HybridConfig, available: Container[str] | None) -> EagleConfig:
    fields.only("kv_lora_rank", ())
    nested = fields.given("eagle_config")
    eagle = Fields(nested if isinstance(nested, Mapping) else {})
    eagle.only("use_aux_hidden_state", (True,))
    layers = layer_places(target)
    count = len(layers) - 1
    ids = fields.integers("eagle_aux_hidden_state_layer_ids", []) or eagle.integers(
        "eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3]
    )
    speculators = fields.given("speculators_model_type") is not None
    return EagleConfig(
        **_transformer(fields, target, available),
        places=_places("eagle_aux_hidden_state_layer_ids", ids, layers),
        num_layers=fields.integer("num_hidden_layers", 1),
        normed_residual=fields.flag("norm_before_residual", speculators),
        norms_states=fields.flag("norm_before_fc", False),
    )


def _block(fields: Fields, target: HybridConfig, available: Container[str] | None) -> BlockConfig:
    nested = fields.given("dflash_config")
    own = nested if isinstance(nested, Mapping) else {}
    both = Fields({**fields.raw, **own})
    both.only("kv_lora_rank", ())
    kinds = set(both.strings("layer_types") or ("full_attention",))
    # Layers with windows are causal unless the config says otherwise.
    windows = kinds == {"sliding_attention"} and both.given("is_causal") is False
    for name in ("causal", "is_causal", "attention_sink_bias", "add_swa_attention_sink_bias"):
        both.only(name, (False,))
    for name in () if windows else ("use_swa", "use_sliding_window"):
        both.only(name, (False,))
    if not windows and (wrong := sorted(kinds - {"full_attention"})):
        raise ModelConfigError(
            f"config field layer_types has {wrong}: only 'full_attention' is supported, or windows in all layers with "
            "is_causal false"
        )
    layers = layer_places(target)
    # A layer's number means its output here.
    ids = [layer + 1 for layer in both.integers("target_layer_ids", [])]
    rank = both.integer("markov_rank", 0)
    mask = both.integer("mask_token_id", -1)
    if not 0 <= mask < target.vocab_size:
        raise ModelConfigError(f"config field mask_token_id is {mask}: expected one of {target.vocab_size} tokens")
    arguments = _transformer(both, target, available)
    qk_norm = QKNormConfig(arguments["norm_eps"])
    window = both.integer("sliding_window", 0) if windows else None
    attention = dataclasses.replace(arguments["attention"], qk_norm=qk_norm, window=window)
    return BlockConfig(
        **arguments | {"attention": attention},
        places=_places("target_layer_ids", ids, layers),
        num_layers=both.integer("num_hidden_layers", 1),
        embedding_multiplier=both.number("input_embedding_scale", 1.0),
        mask_token=mask,
        markov_rank=rank,
        from_newest=rank > 0 and both.flag("sample_from_anchor", True),
        estimates=rank > 0 and both.flag("enable_confidence_head", False) and _has(available, f"{_CONFIDENCE}.weight"),
        estimates_by_token=both.flag("confidence_head_with_markov", False),
        conv_kernel=both.integer("conv_kernel_size", 0),
        conv_group=both.integer("conv_group_size", 1),
        selector_rank=both.integer("selector_rank", 0),
        selector_top=both.integer("selector_top_k", 0),
        logit_multiplier=both.number("output_multiplier", 1.0),
        logit_cap=both.number("final_logit_softcapping", 0.0),
    )


def _has(available: Container[str] | None, name: str) -> bool:
    return available is None or name in available


def _dspark(fields: Fields, target: HybridConfig, available: Container[str] | None) -> BlockConfig:
    if fields.integer("markov_rank", 0) < 1:
        raise ModelConfigError("config field markov_rank is missing: a DSpark drafter of this form is not supported")
    return _block(fields, target, available)


def _places(name: str, ids: list[int], layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the places in the pattern of hidden states before layers with these numbers, or after the last."""
    if not ids or min(ids) < 0 or max(ids) >= len(layers):
        raise ModelConfigError(f"the drafter reads hidden states at {ids} ({name}): expected 0 to {len(layers) - 1}")
    return tuple(layers[each] for each in ids)


def _transformer(fields: Fields, target: HybridConfig, available: Container[str] | None) -> dict[str, Any]:
    """Returns the arguments of a drafter that all kinds have. Raises ModelConfigError if it is for another target."""
    size = fields.integer("hidden_size", 0)
    made_for = fields.integer("target_hidden_size", size)
    vocab = fields.integer("vocab_size", target.vocab_size)
    for what, its, ours in (("hidden size", made_for, target.hidden_size), ("vocabulary", vocab, target.vocab_size)):
        if its != ours:
            raise ModelConfigError(f"the drafter is for a model with {what} {its}, but this model has {ours}")
    own_vocab = fields.integer("draft_vocab_size", vocab)
    if own_vocab > vocab:
        raise ModelConfigError(f"config field draft_vocab_size is {own_vocab}: at most vocab_size {vocab} is expected")
    own_embedding = size != target.hidden_size if available is None else _EMBEDDING in available
    own_head = _has(available, _HEAD)
    for table, own in ((_EMBEDDING, own_embedding), (_HEAD, own_head)):
        if not own and (size != target.hidden_size or (table == _HEAD and own_vocab != vocab)):
            raise ModelConfigError(f"the drafter has no {table}, and the model's has another shape")
    if (activation := fields.text("hidden_act", "silu")) not in ACTIVATIONS:
        raise ModelConfigError(f"config field hidden_act is {activation!r}: known are {', '.join(ACTIVATIONS)}")
    return {
        "hidden_size": size,
        "vocab_size": own_vocab,
        "attention": attention_config(fields, size, num_heads=0),
        "mlp": mlp_config(fields, 0),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "own_embedding": own_embedding,
        "own_head": own_head,
        "maps_vocabulary": own_vocab < vocab or (available is not None and OFFSETS in available),
    }


_KINDS: Mapping[str, Callable[[Fields, HybridConfig, Container[str] | None], DrafterConfig]] = {
    "eagle3": _eagle,
    "dflash": _block,
    "dspark": _dspark,
}
