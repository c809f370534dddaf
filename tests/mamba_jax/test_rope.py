"""Scaled rotary embeddings: transformers' frequencies, the context that they reach, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from mamba_jax.config import ModelConfigError
from mamba_jax.families import FAMILIES, config_from_hf
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

CASES = json.loads((Path(__file__).parents[1] / "golden/rope.json").read_text())
BAMBA = {"model_type": "bamba", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "mamba_n_heads": 4, "mamba_d_head": 64, "num_hidden_layers": 1, "attn_layer_indices": [0]}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_frequencies_are_those_of_transformers(case):
    rope = rope_config(Fields(case), case["head_dim"])
    np.testing.assert_allclose(rope.frequencies, case["frequencies"], rtol=1e-6)
    assert rope.scale == pytest.approx(case["scale"], rel=1e-9)


def dynamic(theta, size, length, original, factor):
    """Frequencies of dynamic NTK scaling, as transformers' definition has them for a sequence of `length` tokens."""
    base = theta * (factor * length / original - (factor - 1)) ** (size / (size - 2))
    return [base ** (-2 * i / size) for i in range(size // 2)]


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_dynamic_scaling_is_that_of_the_longest_context(factor):
    scaling = {"type": "dynamic", "factor": factor}
    rope = rope_config(Fields({"max_position_embeddings": 1024, "rope_scaling": scaling}), 16)
    np.testing.assert_allclose(rope.frequencies, dynamic(1e4, 16, 1024 * factor, 1024, factor), rtol=1e-12)
    assert (rope.scale, rope.positions) == (1.0, 1024 * factor)


def test_yarn_reads_mscale_only_without_an_attention_factor():
    scaling = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0, "mscale": "deepseek", "mscale_all_dim": 1.0}
    assert rope_config(Fields({"max_position_embeddings": 64, "rope_scaling": scaling}), 16).scale == 2.0


LONGER = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"long_factor": 2.0, "short_factor": 1.0, "original_max_position_embeddings": 512},
}
FIELDS = {
    "granitemoehybrid": {"position_embedding_type": "rope", "layer_types": ["attention"], "num_hidden_layers": 1},
    "zamba2": {"use_mem_rope": True, "layers_block_type": ["hybrid"]},
    "minimax_text_01": {"rotary_dim": 64},
    "minimax_m1": {"rotary_dim": 64},
}
"""Fields with which a model type rotates, or rotates a part."""
THETA = {"rope_parameters": {"rope_theta": 7e5}}


def rotates(model_type):
    return rope_of(config_from_hf({"model_type": model_type, **FIELDS.get(model_type, {}), **THETA})) is not None


def rope_of(config):
    attentions = (config.attention, config.windowed_attention, config.latent_attention)
    return next((one.rope for one in attentions if one is not None and one.rope is not None), None)


TYPES = {one.removesuffix("_text") for family in FAMILIES for one in family.model_types}
ROTARY = sorted(filter(rotates, TYPES))


def test_these_have_no_positions():
    assert TYPES - set(ROTARY) == {"nemotron_h", "mamba", "falcon_mamba", "mamba2", "kimi_linear", "jamba"}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", LONGER)
@pytest.mark.parametrize("model_type", ROTARY)
def test_every_family_that_rotates_has_every_kind(model_type, kind, key):
    base = {"model_type": model_type, "max_position_embeddings": 2048, **FIELDS.get(model_type, {})}
    plain = rope_of(config_from_hf(base | THETA))
    parameters = {"rope_type": kind, "rope_theta": 7e5, **LONGER[kind]}
    for name in ("long_factor", "short_factor"):
        if name in parameters:
            parameters[name] = [parameters[name]] * (plain.size // 2)
    config = config_from_hf({**base, key: parameters})
    rope = rope_of(config)
    assert (rope.theta, rope.size, len(rope.frequencies)) == (7e5, plain.size, plain.size // 2)
    expected = rope_config(Fields({"max_position_embeddings": 2048, key: parameters}), plain.size)
    assert rope.frequencies == expected.frequencies
    assert config.max_position_embeddings == (8192 if kind in ("linear", "dynamic", "yarn") else 2048)


def default_context(model_type):
    return config_from_hf({"model_type": model_type}).max_position_embeddings


@pytest.mark.parametrize("model_type", filter(default_context, ROTARY))
def test_without_a_context_the_default_of_the_family_is_scaled(model_type):
    base, default = {"model_type": model_type, **FIELDS.get(model_type, {})}, default_context(model_type)
    linear = base | {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e5}}
    assert config_from_hf(linear).max_position_embeddings == 4 * default
    assert config_from_hf(linear | {"max_position_embeddings": None}).max_position_embeddings == 4 * default


def test_ling_as_transformers_saves_it():
    """The context is under another name."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 6e6, "original_max_position_embeddings": 512}
    saved = {"model_type": "bailing_hybrid", "rope_parameters": yarn, "qk_rope_head_dim": 16}
    config = config_from_hf(saved | {"model_max_length": 1024})
    assert config.max_position_embeddings == 2048
    assert rope_of(config) == rope_of(config_from_hf(saved | {"max_position_embeddings": 1024}))


def test_both_fields_are_read_together():
    fields = {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_type": None},
              "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "max_position_embeddings": 8}  # fmt: skip
    rope = rope_config(Fields(fields), 8, share=1.0)
    assert (rope.theta, rope.size) == (5.0, 4)
    assert rope.frequencies == (0.5, 0.5 * 5.0**-0.5)
    each = {"rope_parameters": {"full_attention": {"rope_theta": 3.0}, "sliding_attention": {"rope_theta": 2.0}}}
    assert rope_config(Fields(each), 8).theta == 3.0
    assert not rope_config(Fields({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}), 8).frequencies


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "rope_type is 'spiral': supported are default, linear, dynamic, yarn"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor is 0.5: at least 1"),
        ({"type": "linear"}, "factor is None: a number over 0"),
        ({"rope_type": "yarn", "factor": -1.0}, "factor is -1.0: a number over 0"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}, "is 'x': a number"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "less than"),
        (
            {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0],
             "original_max_position_embeddings": 64},
            "long_factor is .*: a list of 8 numbers",
        ),
    ],
)  # fmt: skip
def test_wrong_scaling_is_said(rope, message):
    with pytest.raises(ModelConfigError, match=message):
        config_from_hf({**BAMBA, "max_position_embeddings": 1024, "rope_scaling": rope})
