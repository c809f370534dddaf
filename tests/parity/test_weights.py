"""A fixture's tensors all arrive, each once, with their values; the draft layer's too, which Hugging Face drops."""

import re

import jax.numpy as jnp
import numpy as np
from golden.recipes import RECIPES
from safetensors.flax import load_file

from mamba_jax.model import parameters


def test_every_number_of_the_file_is_in_the_model(case):
    stored = load_file(case.directory / "model.safetensors")
    # The second part: transformers also saves what it computes from MiniMax's decay rates.
    ignored = re.compile(r"model\.visual\.|.*\.(slope_rate|(query|key|diagonal)_decay)$")
    stored = {name: tensor for name, tensor in stored.items() if not ignored.match(name)}
    ours = parameters(case.model)
    assert sum(tensor.size for tensor in stored.values()) == case.model.num_parameters

    def values(tensors):
        return np.sort(np.concatenate([np.asarray(tensor, np.float32).reshape(-1) for tensor in tensors]))

    assert np.array_equal(values(stored.values()), values(param[...] for param in ours.values()))
    drafts = [tensor for name, tensor in stored.items() if name.startswith("mtp.")]
    if drafts:
        kept = [param[...] for path, param in ours.items() if path.startswith("mtp.")]
        assert np.array_equal(values(drafts), values(kept))
    assert any(path.startswith("mtp.") for path in ours) == RECIPES[case.name].mtp


def test_what_steers_the_recurrence_stays_float32_in_bfloat16(case):
    exact = parameters(case.model)
    for path, param in parameters(case.load("bfloat16")).items():
        if path.endswith(("a_log", "dt_bias", "dt_proj.bias", ".d", "correction_bias", "recurrent_param")):
            assert param[...].dtype == jnp.float32, path
            assert np.array_equal(param[...], exact[path][...]), path
        elif "router" not in path:
            assert param[...].dtype == jnp.bfloat16, path
