"""Scaled rotary embeddings: transformers' frequencies, the context that they reach, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from mamba_jax.config import ModelConfigError, need
from mamba_jax.families import config_from_hf
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


@pytest.mark.parametrize(
    ("name", "positions"), [("linear", 4096), ("yarn", 2048), ("yarn_attention_factor", 4096), ("llama3", 1024)]
)
def test_the_context_is_as_long_as_the_frequencies_reach(name, positions):
    case = CASES[name]
    config = config_from_hf({**BAMBA, **{key: case[key] for key in ("rope_parameters", "max_position_embeddings")}})
    assert config.max_position_embeddings == positions
    assert need(need(config.attention).rope).frequencies


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic': supported are default, linear, yarn"),
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
