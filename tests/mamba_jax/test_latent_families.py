"""The configs of Kimi Linear, Ling 3.0 and Lara 4 Mini: delta rules next to attention, the first two over latents."""

from mamba_jax import families
from mamba_jax.config import RopeConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding.parameters import placements


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


def test_ling_has_a_latent_attention_in_every_group_of_layers():
    config = families.config_from_hf({"model_type": "bailing_hybrid", "num_hidden_layers": 6, "layer_group_size": 3})
    assert config.pattern == "D-D-LEDEDELE"
    assert (config.latent_attention.rope.theta, config.latent_attention.rope.size) == (6e6, 64)
    assert config.recurrence("D").log_decay_bound == -5.0
    unbounded = families.config_from_hf({"model_type": "bailing_hybrid", "kda_safe_gate": False})
    assert unbounded.recurrence("D").log_decay_bound is None


def test_norms_of_latents_have_an_epsilon_of_their_own():
    for model_type in ("kimi_linear", "bailing_hybrid"):
        config = families.config_from_hf({"model_type": model_type, "rms_norm_eps": 1e-3})
        assert (config.norm_eps, config.latent_attention.norm_eps) == (1e-3, 1e-6)


def test_ling_may_have_latents_of_queries():
    ling = {"model_type": "bailing_hybrid", "num_hidden_layers": 2, "layer_group_size": 2, "q_lora_rank": 24}
    config = families.config_from_hf(ling)
    names, declared = families.weight_names(config), placements(config)
    assert names.keys() == declared.keys() == parameters(HybridModel.abstract(config)).keys()
    found = {part: names[f"blocks.2.mixer.{part}.weight"].names for part in ("q_latent_proj", "q_norm", "q_proj")}
    prefix = "model.layers.1.attention."
    assert found == {part: (f"{prefix}{theirs}.weight",) for part, theirs in
                     (("q_latent_proj", "q_a_proj"), ("q_norm", "q_a_layernorm"), ("q_proj", "q_b_proj"))}  # fmt: skip


def test_lara_attends_to_everything_without_positions():
    config = families.config_from_hf({"model_type": "lara_mini", "num_hidden_layers": 6, "sliding_window": 7})
    assert config.pattern == "DEWEDE*EWEDE"
    assert (config.attention.rope, config.attention.window) == (None, None)
    assert (config.windowed_attention.rope, config.windowed_attention.window) == (RopeConfig(1e4, 128), 7)
    assert (config.moe.shared_gate, config.moe.shared_size, config.recurrence("D").num_groups) == (False, 512, 8)
    # Of one tensor, or of four.
    names = families.weight_names(config)
    for available, rows in (("in_proj", (2048, 4096)), ("in_proj_qkv", (2048, 4096))):
        found = names["blocks.0.mixer.v_proj.weight"].find({f"model.layers.0.linear_attn.{available}.weight"})
        assert found.rows == rows
    assert names["blocks.0.mixer.a_proj.weight"].rows == (6144 + 16, 6144 + 32)
