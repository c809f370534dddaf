"""Models with quantized weights: they say what the weights stand for, whatever is quantized."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.quantized.rounding import Rounding
from kernels_pallas.quantized import Quantized
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import Partition
from tests.support.models.random_models import random_model
from tests.support.models.tiny_configs import EVERYTHING, MAMBA, SHARED, VOCAB
from tests.support.stored_jit import late

WEIGHTS = re.compile(r"(proj(_\w+)?|latent_\w+|linear|up|down|embed|lm_head)\.weight|experts\.(up|down)")


dequantize = late(Quantized.dequantize)


def narrow(path, weight, *, by_groups):
    """A weight in int8, as parameters by path; and what they stand for."""
    inputs = weight.shape[-1]
    group = inputs // (2 if inputs % 2 == 0 else 1) if by_groups else 0
    parts = Rounding("int8", group).round(np.asarray(weight, np.float32))
    if by_groups:
        del parts["channel_scale"]  # ones
    parts = {name: jnp.asarray(value) for name, value in parts.items()}
    return {f"{path}.{name}": value for name, value in parts.items()}, dequantize(Quantized(**parts))


def both(config, by_groups):
    """A model with every weight quantized that can be, and the wide model that it stands for."""
    values = {path: leaf[...] for path, leaf in parameters(random_model(config)).items()}
    few, wide = {}, {}
    for path, value in values.items():
        parts, wide[path] = narrow(path, value, by_groups=by_groups) if WEIGHTS.search(path) else ({path: value}, value)
        few |= parts
    assert len(few) > len(wide)
    return HybridModel.from_parameters(config, few), HybridModel.from_parameters(config, wide)


@pytest.mark.smoke
@pytest.mark.parametrize("by_groups", [False, True])
@pytest.mark.parametrize("config", [EVERYTHING, SHARED], ids=["everything", "shared"])
def test_says_what_the_wide_model_says(config, by_groups):
    few, wide = both(config, by_groups)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 9)))
    run = jax.jit(lambda model, tokens: model(tokens))
    np.testing.assert_allclose(run(few, tokens), run(wide, tokens), atol=2e-4)
    assert few.num_parameters == wide.num_parameters
    assert few.dtype == jnp.float32


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("blocks.0.mixer.out_proj.weight.values", lambda v: None, "out_proj.weight.channel_scale belongs to no"),
        ("blocks.0.mixer.out_proj.weight.channel_scale", lambda v: v[1:], "channel_scale has shape"),
        ("blocks.0.mixer.out_proj.weight.values", lambda v: v[:, 1:], "out_proj.weight has shape"),
        ("blocks.0.mixer.conv_x.weight", lambda v: narrow("conv", v, by_groups=False)[0], "conv_x.weight cannot be"),
    ],
)
def test_wrong_parts_are_refused(path, change, message):
    few, _ = both(EVERYTHING, False)
    values = {path: leaf[...] for path, leaf in parameters(few).items()}
    changed = change(values.pop(path))
    values |= {f"{path}.{n[5:]}": v for n, v in changed.items()} if isinstance(changed, dict) else {path: changed}
    with pytest.raises(ValueError, match=message):
        HybridModel.from_parameters(EVERYTHING, {p: v for p, v in values.items() if v is not None})


def test_scales_are_divided_along_with_their_values():
    shards, mamba = 2, dataclasses.replace(MAMBA, num_groups=2)
    for config in (dataclasses.replace(one, mamba=mamba) for one in (EVERYTHING, SHARED)):
        partition, (few, _) = Partition.of(config, shards), both(config, True)
        channels, _ = both(config, False)
        for path, leaf in (parameters(few) | parameters(channels)).items():
            weight, _, part = path.rpartition(".")
            spec = tuple(partition.parameter(path))
            dense = tuple(partition.parameter(weight)) if part in ("values", "channel_scale", "group_scale") else spec
            assert ("tensor" in spec) == ("tensor" in dense) or part == "channel_scale", path
            assert len(spec) <= leaf.ndim
            for axis, size in zip(spec, leaf.shape, strict=False):
                assert axis is None or size % shards == 0, path
