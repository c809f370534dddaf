"""Families: config.json in all its spellings, and every weight's name."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from mamba_jax import families
from mamba_jax.config import ModelConfigError, RopeConfig
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel, parameters

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FIXTURES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
TYPES = [one for family in families.FAMILIES for one in family.model_types]


def read(name):
    """A fixture's config, and its tensors' shapes."""
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    with safe_open(GOLDEN / name / "model.safetensors", "np") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return families.as_stored(families.config_from_hf(raw), stored), stored


def pieces(source, shape):
    """(tensor, rows) of every tensor that a parameter takes something of."""
    whole = source.stored(shape)[0]
    start, end = source.rows or (0, whole)
    begins = range(0, whole, whole // source.pieces)
    return [(name, (begin + start, begin + end)) for name in source.names for begin in begins]


@pytest.mark.parametrize("name", FIXTURES)
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


@pytest.mark.parametrize("name", FIXTURES)
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


def test_draft_layer_is_left_out_where_the_checkpoint_has_none():
    config, stored = read("nemotronh-moe")
    assert config.mtp_pattern == "*E"
    assert families.as_stored(config, stored) == config
    without = {key for key in stored if not key.startswith("mtp.")}
    assert families.as_stored(config, without) == dataclasses.replace(config, mtp_pattern="")
    # One tensor of it is enough to say that the others are missing.
    assert families.as_stored(config, without | {"mtp.layers.0.enorm.weight"}) == config
    # Tables of its own are in no field of config.json.
    own = {"own_mtp_embedding": True, "own_mtp_head": True}
    tables = {"mtp.embeddings.weight", "mtp.lm_head.weight"}
    found = families.as_stored(config, {*stored, *tables})
    assert found == dataclasses.replace(config, **own)
    assert families.weight_names(found)["mtp.lm_head.weight"].names == ("mtp.lm_head.weight",)


def test_mtp_weights_are_ignored_without_the_layer():
    config, _ = read("nemotronh-moe")
    ignored = families.family_of(config).ignored(dataclasses.replace(config, mtp_pattern=""))
    assert any(re.fullmatch(pattern, "mtp.layers.0.mixer.q_proj.weight") for pattern in ignored)
    assert not any(re.fullmatch(r"mtp\..*", pattern) for pattern in families.ignored(config))


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


def test_registry():
    assert [families.get(one).name for one in ("nemotron_h", "zamba2")] == ["NemotronH", "Zamba2"]
    for unknown in ("llama", None, ""):
        with pytest.raises(families.UnknownModelType, match="known are nemotron_h, bamba, granite"):
            families.get(unknown)


@pytest.mark.parametrize("model_type", TYPES)
def test_an_empty_config_has_the_defaults_of_transformers(model_type):
    config = families.config_from_hf({"model_type": model_type})
    assert families.weight_names(config).keys() == parameters(HybridModel.abstract(config)).keys()
    assert model_type in families.family_of(config).model_types
    defaults = {"olmo_hybrid": (100257,), "kimi_linear": (163586,), "bailing_hybrid": (156895,)}
    defaults |= {
        "lara_mini": (151643,),
        "mamba": (0,),
        "falcon_mamba": (0,),
        "lfm3": (124900,),
        "recurrent_gemma": (1,),
    }
    defaults |= {one: () for one in TYPES if one.startswith("qwen")}
    assert config.eos_token_ids == defaults.get(model_type, (2,))


@pytest.mark.parametrize("model_type", TYPES)
def test_token_ids_may_be_null_or_several(model_type):
    config = families.config_from_hf({"model_type": model_type, "eos_token_id": [5, 7], "bos_token_id": None})
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 7), None)
    assert families.config_from_hf({"model_type": model_type, "eos_token_id": None}).eos_token_ids == ()


NEMOTRON = {"model_type": "nemotron_h", "intermediate_size": 64}


def test_nemotron_patterns_old_and_new():
    def pattern(**fields):
        return families.config_from_hf({**NEMOTRON, **fields}).pattern

    layers = ["linear_attention", "mlp", "full_attention", "moe"]
    assert pattern(layers_block_type=layers) == "M-*E"
    assert pattern(layer_types=["mamba", "attention"]) == "M*"
    assert pattern(hybrid_override_pattern="M-M*") == "M-M*"
    assert pattern(hybrid_override_pattern="M-M*", layers_block_type=layers) == "M-*E"
    assert pattern() == "ME*-"

    def mtp(**fields):
        return families.config_from_hf({**NEMOTRON, "num_nextn_predict_layers": 1, **fields}).mtp_pattern

    assert mtp() == mtp(mtp_layers_block_type=["attention", "moe"]) == "*E"
    assert mtp(mtp_hybrid_override_pattern="*-") == "*-"
    assert mtp(mtp_layers_block_type=["full_attention", "moe", "mlp"], mtp_hybrid_override_pattern="*-") == "*E-"
    assert mtp(num_nextn_predict_layers=0) == ""


def test_nemotron_with_several_draft_layers_is_served_without_them():
    config = families.config_from_hf({**NEMOTRON, "hybrid_override_pattern": "M*-", "num_nextn_predict_layers": 2})
    assert (config.pattern, config.mtp_pattern, config.unused_mtp_layers, config.moe) == ("M*-", "", 2, None)
    assert not any(path.startswith("mtp.") for path in families.weight_names(config))


def test_nemotron_old_names_and_unlimited_steps():
    config = families.config_from_hf(
        {
            **NEMOTRON,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "time_step_limit": [0.1, 0.2],
            "time_step_min": 0.1,
        }
    )
    assert (config.mamba.num_groups, config.mamba.conv_width, config.mamba.conv_bias) == (4, 3, False)
    assert config.mamba.dt_limit == (0.0, math.inf)


def test_nemotron_one_size_per_mlp():
    config = families.config_from_hf({**NEMOTRON, "hybrid_override_pattern": "M-M-", "intermediate_size": [32, 48]})
    assert [config.mlp.size(i) for i in (0, 1)] == [32, 48]
    with pytest.raises(ModelConfigError, match="1 intermediate sizes for 2 MLPs"):
        families.config_from_hf({**NEMOTRON, "hybrid_override_pattern": "M-M-", "intermediate_size": [32]})


@pytest.mark.parametrize("model_type", ["bamba", "granitemoehybrid", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("infinity", [math.inf, {"__float__": "Infinity"}], ids=["bare", "tagged"])
def test_step_limits(model_type, infinity):
    config = families.config_from_hf({"model_type": model_type, "time_step_limit": [0.25, infinity]})
    assert config.mamba.dt_limit == (0.25, math.inf)


def test_rope_old_and_new():
    def rope(model_type="falcon_h1", **fields):
        fields = {"head_dim": 24, "position_embedding_type": "rope", **fields}
        return families.config_from_hf({"model_type": model_type, **fields}).attention.rope

    assert rope() == RopeConfig(10_000.0, 24)
    assert rope(rope_theta=1e11) == RopeConfig(1e11, 24)
    assert rope(rope_parameters={"rope_type": "default", "rope_theta": 50.0}, rope_theta=7.0) == RopeConfig(50.0, 24)
    assert rope(rope_theta=7.0, rope_scaling=None) == RopeConfig(7.0, 24)
    # Only Bamba looks at the share, and its old field for it says nothing.
    assert rope("bamba", partial_rotary_factor=0.25) == RopeConfig(10_000.0, 12)
    assert rope("bamba", rope_parameters={"partial_rotary_factor": 0.25}) == RopeConfig(10_000.0, 6)
    assert rope(rope_parameters={"partial_rotary_factor": 0.25}) == RopeConfig(10_000.0, 24)
    assert rope("granitemoehybrid", position_embedding_type="nope") is None
    assert rope("granitemoehybrid", position_embedding_type=None) is None
    assert rope("nemotron_h", rope_theta=7.0) is None


def test_heads_and_widths_that_follow_from_others():
    falcon = {"model_type": "falcon_h1", "hidden_size": 96, "head_dim": 8, "mamba_n_heads": 6, "mamba_d_ssm": 120}
    assert families.config_from_hf({**falcon, "mamba_d_ssm": None}).mamba.inner_size == 192
    assert families.config_from_hf(falcon).mamba.head_dim == 20
    assert families.config_from_hf(falcon).attention.num_kv_heads == 8
    assert families.config_from_hf({**falcon, "num_key_value_heads": None}).attention.num_kv_heads == 32
    granite = {"model_type": "granitemoehybrid", "hidden_size": 96, "num_attention_heads": 4, "mamba_n_heads": 6}
    assert families.config_from_hf(granite).attention.num_kv_heads == 4
    assert families.config_from_hf(granite).attention.scale == 1.0
    zamba = families.config_from_hf({"model_type": "zamba2", "hidden_size": 64, "num_attention_heads": 4})
    assert (zamba.attention.head_dim, zamba.attention.scale, zamba.attention.input_size) == (32, 0.25, 128)
    assert zamba.mlp.intermediate_size == 256


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
    found = {
        residual.kind: (residual.input_multiplier, residual.output_multiplier) for residual in one.normed_residuals
    }
    assert found == {"F": (3.5, 1.0), "*": (1.0, 0.5), "E": (2.0, 1.0)}
    # The first and the last layer: of the same heads, the last ones' states decay slowest.
    lightning = one.recurrence("F")
    assert lightning.decay_rates(0)[-1] == pytest.approx(2**-8 * (1 + 1e-5))
    assert lightning.decay_rates(1)[0] == pytest.approx(2**-0.25 * (1e-5 + 1e-5 / 2), rel=1e-4)


def test_the_layers_of_jamba():
    mini = families.config_from_hf({"model_type": "jamba", "num_hidden_layers": 8})
    assert mini.pattern == "S-SES-SE*-SES-SE"
    dense = families.config_from_hf({"model_type": "jamba", "num_hidden_layers": 2, "num_experts": 1})
    assert (dense.pattern, dense.moe) == ("S-S-", None)


def test_the_width_of_falcon_mamba_is_not_its_expansion():
    falcon = {"model_type": "falcon_mamba", "hidden_size": 64, "expand": 16}
    assert families.config_from_hf(falcon | {"intermediate_size": 128}).inner_size == 128
    assert families.config_from_hf(falcon).inner_size == 1024
    assert families.config_from_hf(falcon).recurrence("S").dt_rank == 4


def test_zamba_blocks_are_tied_with_the_head():
    zamba = {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"]}
    assert families.config_from_hf({**zamba, "num_mem_blocks": 2}).shared.num_blocks == 2
    assert families.config_from_hf({**zamba, "num_mem_blocks": 5}).shared.num_blocks == 3
    untied = families.config_from_hf({**zamba, "num_mem_blocks": 2, "tie_word_embeddings": False})
    assert untied.shared.num_blocks == 3
    assert families.config_from_hf({**zamba, "layers_block_type": ["mamba"]}).shared is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**NEMOTRON, "hybrid_override_pattern": "M?"}, r"layer pattern 'M\?'"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "conv"]}, r"layer types \['conv'\]: known are"),
        ({**NEMOTRON, "mlp_hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({**NEMOTRON, "mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({**NEMOTRON, "hidden_size": "big"}, "hidden_size is 'big': a whole number"),
        ({**NEMOTRON, "hidden_size": 0}, "is 0: at least 1"),
        ({**NEMOTRON, "use_bias": 1}, "use_bias is 1: true or false"),
        ({**NEMOTRON, "num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({**NEMOTRON, "n_groups": 7}, "128 Mamba heads cannot be divided into 7 Mamba groups"),
        ({**NEMOTRON, "sliding_window": 128}, "sliding_window is 128"),
        ({**NEMOTRON, "hybrid_override_pattern": "E", "n_group": 3}, "8 experts in 3 groups"),
        ({**NEMOTRON, "hybrid_override_pattern": "E", "num_experts_per_tok": 9}, "9 experts per token"),
        ({"model_type": "falcon_h1", "rope_parameters": {"rope_type": "spiral"}}, "rope_type is 'spiral': supported"),
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
        (
            {"model_type": "bailing_hybrid", "q_lora_rank": 1536, "group_norm_size": 8},
            "group_norm_size is 8: only null",
        ),
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


def test_sources_say_where_and_in_what_shape():
    whole = HFSource(("a",), alternatives=(HFSource(("b",), rows=(0, 2), stored_shape=(4, 3)),))
    assert whole.find({"a", "b"}) is whole
    assert whole.find({"b"}) is whole.alternatives[0]
    assert whole.find({"c"}) is None
    assert whole.stored((2, 3)) == (2, 3)
    assert whole.alternatives[0].stored((2, 3)) == (4, 3)
    stacked = HFSource(("e.0", "e.1"), stack=True)
    assert stacked.stored((2, 5, 6)) == (5, 6)
    assert stacked.find({"e.0"}) is None
