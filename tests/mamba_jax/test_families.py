"""Families: config.json in all its spellings, and every weight's name."""

import dataclasses
import json
import math
import re
from operator import attrgetter

import pytest
from safetensors import safe_open

from mamba_jax import families
from mamba_jax.config import ModelConfigError, RopeConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding.parameters import placements
from tests.support.models.golden_case import FIXTURES, NAMES

EOS = json.loads((FIXTURES / "eos.json").read_text())
"""The end-of-sequence tokens of a config.json without them, by model type."""
TYPES = [one for family in families.FAMILIES for one in family.model_types]


def read(name):
    """A fixture's config, and its tensors' shapes."""
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    with safe_open(FIXTURES / name / "model.safetensors", "np") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return families.as_stored(families.config_from_hf(raw), stored), stored


def pieces(source, shape):
    """(tensor, rows) of every tensor that a parameter takes something of."""
    whole = source.stored(shape)[0]
    start, end = source.rows or (0, whole)
    begins = range(0, whole, whole // source.pieces)
    return [(name, (begin + start, begin + end)) for name in source.names for begin in begins]


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_of_a_checkpoint_is_used_once_and_every_parameter_filled(name):
    config, stored = read(name)
    params = parameters(HybridModel.abstract(config))
    sources = families.weight_names(config)
    assert sources.keys() == params.keys()
    used = {key: [] for key in stored}
    for path, param in params.items():
        source = sources[path].find(stored)
        assert source is not None, f"{path}: none of {sources[path].names} is there"
        taken, of_row = 0, math.prod(source.stored(param.shape)[1:])
        for key, (start, end) in pieces(source, param.shape):
            assert stored[key] == source.stored(param.shape), f"{path} from {key}"
            used[key].append((start, end))
            taken += (end - start) * of_row
        assert taken == math.prod(param.shape), f"{path}: {taken} elements for the shape {param.shape}"
    for key, ranges in used.items():
        if ranges:
            ends = [0, *(end for _, end in sorted(ranges))]
            assert [start for start, _ in sorted(ranges)] == ends[:-1], f"{key} in pieces {ranges}"
            assert ends[-1] == stored[key][0], f"{key} in pieces {ranges}"
        else:
            ignored = families.ignored(config)
            assert any(re.fullmatch(pattern, key) for pattern in ignored), f"{key} is not used"


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_of_a_family_is_found(name):
    config, stored = read(name)
    sources = families.weight_names(config)
    spelt = sources["final_norm.weight"]
    prefixes = [one.names[0].rsplit(".", 2)[0] + "." for one in (spelt, *spelt.alternatives)]
    used = next(prefix for prefix in prefixes if any(key.startswith(prefix) for key in stored))
    for prefix in prefixes:
        swapped = {prefix + key.removeprefix(used) if key.startswith(used) else key for key in stored}
        assert all(source.find(swapped) for source in sources.values())


@pytest.mark.parametrize("name", ["nemotronh-moe", "granite-nope"])
def test_experts_in_the_spelling_of_modules(name):
    """transformers 5 holds experts as one tensor per layer, and some tools save what it holds."""
    config, stored = read(name)
    sources = families.weight_names(config)
    modules = {
        key.replace("input_linear.weight", "experts.gate_up_proj").replace("output_linear.weight", "experts.down_proj")
        if "block_sparse_moe" in key
        else re.sub(r"experts\.\d+\.(up|down)_proj\.weight", r"experts.\1_proj", key)
        for key in stored
    }
    modules = {key.replace("router.layer.weight", "router.weight") for key in modules}
    experts = {path: source.find(modules) for path, source in sources.items() if ".experts." in path}
    assert experts
    assert all(source and not source.stack for source in experts.values())


def test_repeated_shared_blocks():
    config, stored = read("zamba2")
    hybrid = [i for i, kind in enumerate(config.pattern) if kind == "Z"]
    later = f"model.layers.{hybrid[2]}.shared_transformer"
    key = "self_attn.q_proj.weight"
    assert any(re.fullmatch(p, f"{later}.{key}") for p in families.ignored(config))
    # Stored with its last user only: found there.
    first = later.replace(f".{hybrid[2]}.", f".{hybrid[0]}.")
    moved = {name.replace(first, later) for name in stored}
    source = families.weight_names(config)["shared.0.attention.q_proj.weight"]
    assert source.find(moved).names == (f"{later}.{key}",)


@pytest.mark.parametrize("model_type", TYPES)
def test_an_empty_config_has_the_defaults_of_transformers(model_type):
    """Ids of tokens may also be null or several."""
    config = families.config_from_hf({"model_type": model_type})
    every_kind = 1 + max(map(config.pattern.index, config.pattern))  # sublayers; a model of all of them takes long
    short = dataclasses.replace(config, pattern=config.pattern[:every_kind])
    assert families.weight_names(short).keys() == parameters(HybridModel.abstract(short)).keys()
    assert model_type in families.family_of(config).model_types
    assert config.eos_token_ids == tuple(EOS[model_type])
    config = families.config_from_hf({"model_type": model_type, "eos_token_id": [5, 7], "bos_token_id": None})
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 7), None)
    assert families.config_from_hf({"model_type": model_type, "eos_token_id": None}).eos_token_ids == ()


NEMOTRON = {"model_type": "nemotron_h", "intermediate_size": 64}
ROPE = {"model_type": "falcon_h1", "head_dim": 24}
BAMBA = {"model_type": "bamba", "head_dim": 24}
LAYERS = ["linear_attention", "mlp", "full_attention", "moe"]
DRAFTS = {**NEMOTRON, "num_nextn_predict_layers": 1}
OLD = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False}
FALCON = {"model_type": "falcon_h1", "hidden_size": 96, "head_dim": 8, "mamba_n_heads": 6, "mamba_d_ssm": 120}
GRANITE = {"model_type": "granitemoehybrid", "hidden_size": 96, "num_attention_heads": 4, "mamba_n_heads": 6}
FALCON_MAMBA = {"model_type": "falcon_mamba", "hidden_size": 64, "expand": 16}
ZAMBA = {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"]}
LING = {"model_type": "bailing_hybrid", "num_hidden_layers": 6, "layer_group_size": 3}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
LARA = {"model_type": "lara_mini", "num_hidden_layers": 6, "sliding_window": 7}
STEP_LIMITS = [
    ({"model_type": one, "time_step_limit": [0.25, infinity]}, {"mamba.dt_limit": (0.25, math.inf)})
    for one in ("bamba", "granitemoehybrid", "falcon_h1", "mamba2")
    for infinity in (math.inf, {"__float__": "Infinity"})
]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({**NEMOTRON, "layers_block_type": LAYERS}, {"pattern": "M-*E"}),
        ({**NEMOTRON, "layer_types": ["mamba", "attention"]}, {"pattern": "M*"}),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M*"}, {"pattern": "M-M*"}),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M*", "layers_block_type": LAYERS}, {"pattern": "M-*E"}),
        (NEMOTRON, {"pattern": "ME*-"}),
        (DRAFTS, {"mtp_pattern": "*E"}),
        ({**DRAFTS, "mtp_layers_block_type": ["attention", "moe"]}, {"mtp_pattern": "*E"}),
        ({**DRAFTS, "mtp_hybrid_override_pattern": "*-"}, {"mtp_pattern": "*-"}),
        ({**DRAFTS, "mtp_layers_block_type": LAYERS[:0:-1], "mtp_hybrid_override_pattern": "*-"},
         {"mtp_pattern": "E*-"}),
        ({**DRAFTS, "num_nextn_predict_layers": 0}, {"mtp_pattern": ""}),
        ({**NEMOTRON, **OLD, "time_step_limit": [0.1, 0.2], "time_step_min": 0.1},
         {"mamba.num_groups": 4, "mamba.conv_width": 3, "mamba.conv_bias": False, "mamba.dt_limit": (0.0, math.inf)}),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M-", "intermediate_size": [32, 48]},
         {"mlp.intermediate_size": (32, 48)}),
        *STEP_LIMITS,
        ({**NEMOTRON, "hybrid_override_pattern": "M*-", "num_nextn_predict_layers": 2},
         {"pattern": "M*-", "mtp_pattern": "", "unused_mtp_layers": 2, "moe": None}),
        (ROPE, {"attention.rope": RopeConfig(10_000.0, 24)}),
        ({**ROPE, "rope_theta": 1e11}, {"attention.rope": RopeConfig(1e11, 24)}),
        ({**ROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_theta": 7.0},
         {"attention.rope": RopeConfig(50.0, 24)}),
        ({**ROPE, "rope_theta": 7.0, "rope_scaling": None}, {"attention.rope": RopeConfig(7.0, 24)}),
        # Only Bamba looks at the share, and its old field for it says nothing.
        ({**BAMBA, "partial_rotary_factor": 0.25}, {"attention.rope.size": 12}),
        ({**BAMBA, "rope_parameters": {"partial_rotary_factor": 0.25}}, {"attention.rope.size": 6}),
        ({**ROPE, "rope_parameters": {"partial_rotary_factor": 0.25}}, {"attention.rope.size": 24}),
        ({**GRANITE, "position_embedding_type": "nope"}, {"attention.rope": None}),
        ({**GRANITE, "position_embedding_type": None}, {"attention.rope": None}),
        ({**NEMOTRON, "rope_theta": 7.0}, {"attention.rope": None}),
        ({**FALCON, "mamba_d_ssm": None}, {"mamba.inner_size": 192}),
        (FALCON, {"mamba.head_dim": 20, "attention.num_kv_heads": 8}),
        ({**FALCON, "num_key_value_heads": None}, {"attention.num_kv_heads": 32}),
        (GRANITE, {"attention.num_kv_heads": 4, "attention.scale": 1.0}),
        ({"model_type": "zamba2", "hidden_size": 64, "num_attention_heads": 4},
         {"attention.head_dim": 32, "attention.scale": 0.25, "attention.input_size": 128,
          "mlp.intermediate_size": 256}),
        ({"model_type": "jamba", "num_hidden_layers": 8}, {"pattern": "S-SES-SE*-SES-SE"}),
        ({"model_type": "jamba", "num_hidden_layers": 2, "num_experts": 1}, {"pattern": "S-S-", "moe": None}),
        # The width of Falcon-Mamba is not its expansion.
        ({**FALCON_MAMBA, "intermediate_size": 128}, {"inner_size": 128}),
        (FALCON_MAMBA, {"inner_size": 1024, "S.dt_rank": 4}),
        # Zamba's blocks are tied with the head.
        ({**ZAMBA, "num_mem_blocks": 2}, {"shared.num_blocks": 2}),
        ({**ZAMBA, "num_mem_blocks": 5}, {"shared.num_blocks": 3}),
        ({**ZAMBA, "num_mem_blocks": 2, "tie_word_embeddings": False}, {"shared.num_blocks": 3}),
        ({**ZAMBA, "layers_block_type": ["mamba"]}, {"shared": None}),
        (LING, {"pattern": "D-D-LEDEDELE", "latent_attention.rope.theta": 6e6, "latent_attention.rope.size": 64,
                "D.log_decay_bound": -5.0}),
        ({**LING, "kda_safe_gate": False}, {"D.log_decay_bound": None}),
        # Attention to everything without positions.
        (LARA, {"pattern": "DEWEDE*EWEDE", "attention.rope": None, "attention.window": None, "D.num_groups": 8}),
        (LARA, {"windowed_attention.rope": RopeConfig(1e4, 128), "windowed_attention.window": 7}),
        (LARA, {"moe.shared_gate": False, "moe.shared_size": 512}),
        # A field that another one replaces is not read.
        ({"model_type": "lfm2", **ONE_LAYER, "layer_types": ["conv"], "full_attn_idxs": "x"}, {"pattern": "C-"}),
        ({"model_type": "qwen3_next", **ONE_LAYER, "full_attention_interval": "x"}, {"pattern": "DE"}),
        ({**LING, **ONE_LAYER, "layer_group_size": "x"}, {"pattern": "D-"}),
        ({"model_type": "kimi_linear", **ONE_LAYER, "mlp_layer_types": ["dense"], "first_k_dense_replace": "x"},
         {"pattern": "D-"}),
        # Norms of latents have an epsilon of their own.
        *(({"model_type": one, "rms_norm_eps": 1e-3}, {"norm_eps": 1e-3, "latent_attention.norm_eps": 1e-6})
          for one in ("kimi_linear", "bailing_hybrid")),
    ],
)  # fmt: skip
def test_what_a_config_says(fields, found):
    """By the dotted name of a config's field; a recurrence by its letter."""
    config = families.config_from_hf(fields)
    for name, value in found.items():
        letter, _, field = name.partition(".")
        owner = config.recurrence(letter) if len(letter) == 1 else config
        assert attrgetter(field if len(letter) == 1 else name)(owner) == value, name


def test_kimi_in_the_words_of_transformers_and_of_its_makers():
    ours = {"linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 5, "head_dim": 24}}
    ours |= {"num_hidden_layers": 4, "first_k_dense_replace": 2, "num_experts": 6, "num_experts_per_token": 2}
    theirs = {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"], "linear_num_heads": 5}
    theirs |= {"linear_head_dim": 24, "num_hidden_layers": 4, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2}
    theirs |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    one, other = (families.config_from_hf({"model_type": "kimi_linear", **raw}) for raw in (ours, theirs))
    assert one == other
    assert one.pattern == "D-D-LEDE"
    assert families.config_from_hf({"model_type": "kimi_linear"}).pattern.count("L") == 6


def test_ling_may_have_latents_of_queries():
    ling = {"model_type": "bailing_hybrid", "num_hidden_layers": 2, "layer_group_size": 2, "q_lora_rank": 24}
    config = families.config_from_hf(ling)
    names, declared = families.weight_names(config), placements(config)
    assert names.keys() == declared.keys() == parameters(HybridModel.abstract(config)).keys()
    for ours, theirs in (("q_latent_proj", "q_a_proj"), ("q_norm", "q_a_layernorm"), ("q_proj", "q_b_proj")):
        assert names[f"blocks.2.mixer.{ours}.weight"].names == (f"model.layers.1.attention.{theirs}.weight",)


def test_lara_has_input_projections_in_one_tensor_or_in_four():
    names = families.weight_names(families.config_from_hf(LARA))
    source, tensors = names["blocks.0.mixer.v_proj.weight"], []
    for available in ("in_proj", "in_proj_qkv"):
        tensors.append(f"model.layers.0.linear_attn.{available}.weight")
        assert source.find(tensors[-1:]).rows == (2048, 4096)
    assert source.find(tensors) is source, "the first of several that are there"
    assert names["blocks.0.mixer.a_proj.weight"].rows == (6144 + 16, 6144 + 32)


def test_minimax_in_the_words_of_transformers_and_of_its_makers():
    ours = {"num_hidden_layers": 3, "attn_type_list": [0, 1, 0], "rotary_dim": 64, "postnorm": True}
    ours |= {"layernorm_linear_attention_alpha": 3.5, "layernorm_full_attention_beta": 0.5, "layernorm_mlp_alpha": 2.0}
    theirs = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    theirs |= {"linear_attn_alpha_factor": 3.5, "full_attn_beta_factor": 0.5, "mlp_alpha_factor": 2.0}
    one = families.config_from_hf({"model_type": "minimax_text_01", **ours})
    other = families.config_from_hf({"model_type": "minimax", **theirs})
    # Only MiniMax's own code rotates part of each head.
    assert (one.attention.rope.size, other.attention.rope.size) == (64, 128)
    rotated = dataclasses.replace(other.attention, rope=one.attention.rope)
    assert one == dataclasses.replace(other, attention=rotated)
    assert one.pattern == "FE*EFE"
    found = {each.kind: (each.input_multiplier, each.output_multiplier) for each in one.normed_residuals}
    assert found == {"F": (3.5, 1.0), "*": (1.0, 0.5), "E": (2.0, 1.0)}
    # The first and the last layer: of the same heads, the last ones' states decay slowest.
    lightning = one.recurrence("F")
    assert lightning.decay_rates(0)[-1] == pytest.approx(2**-8 * (1 + 1e-5))
    assert lightning.decay_rates(1)[0] == pytest.approx(2**-0.25 * (1e-5 + 1e-5 / 2), rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**NEMOTRON, "hybrid_override_pattern": "M?"}, r"layer pattern 'M\?'"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "conv"]}, r"layer types \['conv'\]: known are"),
        ({**NEMOTRON, "layers_block_type": []}, "the model has no layers"),
        ({**GRANITE, "layer_types": []}, "the model has no layers"),
        ({**ZAMBA, "layers_block_type": []}, "the model has no layers"),
        ({"model_type": "bamba", "attn_layer_indices": [True]}, r"indices is \[True\]: a list of whole numbers"),
        ({**NEMOTRON, "mlp_hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({**NEMOTRON, "mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({**NEMOTRON, "hidden_size": 0}, "is 0: at least 1"),
        ({**NEMOTRON, "head_dim": 0}, "head_dim is 0: at least 1"),
        ({**NEMOTRON, "use_bias": 1}, "use_bias is 1: true or false"),
        ({**NEMOTRON, "num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({**NEMOTRON, "sliding_window": 128}, "sliding_window is 128"),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M-", "intermediate_size": [32]}, "1 intermediate sizes for 2 MLPs"),
        ({**NEMOTRON, "hybrid_override_pattern": "E", "n_group": 3}, "8 experts in 3 groups"),
        ({**NEMOTRON, "hybrid_override_pattern": "E", "num_experts_per_tok": 9}, "9 experts per token"),
        ({"model_type": "falcon_h1", "ssm_multipliers": [1.0]}, "a list of 5 numbers"),
        ({"model_type": "bamba", "mamba_d_head": 48}, "128 Mamba heads of 48 do not make the inner width 8192"),
        ({"model_type": "mamba2", "num_heads": 24}, "24 heads of 64 do not make"),
        ({"model_type": "mamba2", "time_step_limit": [1.0, 0.5]}, "step sizes limited to 1.0..0.5"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"model_type": "zamba2", "n_mamba_heads": 7}, "5120 Mamba channels in 7 heads"),
        ({"model_type": "kimi_linear", "q_lora_rank": 8}, "q_lora_rank is 8: only null is supported"),
        ({"model_type": "kimi_linear", "mla_use_nope": False}, "mla_use_nope is False: only True"),
        ({"model_type": "kimi_linear", "linear_attn_config": 3}, "linear_attn_config is 3: an object"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "the layers 1 to 27, each once"),
        # Ling 2.6 has the same model_type.
        ({"model_type": "bailing_hybrid", "q_lora_rank": 1536, "group_norm_size": 8}, "group_norm_size is 8: only"),
        ({"d_model": 768, "n_layer": 24, "ssm_cfg": {"layer": "Mamba2"}}, "convert_mamba2_ssm_checkpoint_to_pytorch"),
        ({"model_type": "dory"}, "Nemotron-Labs-Dory models need layers that run several times"),
        ({"model_type": "bailing_hybrid", "kda_lower_bound": 5.0}, "log_decay_bound is 5.0: a negative number"),
        ({"model_type": "bailing_hybrid", "no_kda_lora": False}, "no_kda_lora is False: only True"),
        ({"model_type": "falcon_mamba", "time_step_rank": 0}, "dt_rank is 0"),
        ({"model_type": "jamba", "attn_layer_offset": 8}, "attn_layer_offset is 8: 0 to attn_layer_period - 1 = 7"),
        ({"model_type": "jamba", "sliding_window": 8}, "sliding_window is 8"),
        ({"model_type": "jamba", "mamba_inner_layernorms": False}, "mamba_inner_layernorms is False: only True"),
        ({"model_type": "minimax", "sliding_window": 8}, "sliding_window is 8"),
        ({"model_type": "minimax", "layer_types": ["full_attention"]}, "layer_types has 1 entries, for 32 layers"),
        ({"model_type": "minimax_m1", "attn_type_list": [2]}, r"attn_type_list is \[2\]: expected 0 or 1"),
        ({"model_type": "minimax_text_01", "postnorm": False}, "postnorm is False: only True"),
        ({"model_type": "minimax_text_01", "shared_intermediate_size": 8}, "shared_intermediate_size is 8: only 0"),
        ({"model_type": "kimi_linear", "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries, for 27 layers"),
    ],
)
def test_what_is_not_supported_is_refused(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        families.config_from_hf(fields)
