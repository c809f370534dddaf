"""Experts of which each device has some: only its own rows go through them, and none is left out."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import MOE, HybridConfig
from mamba_jax.modules.feed_forward import MoE, rows_at_once
from mamba_jax.sharding import make_mesh, use_mesh
from mamba_jax.sharding.across import ShardedModule, across
from mamba_jax.sharding.parameters import mixer_placements
from tests.support.models.random_models import random_module
from tests.support.models.tiny_configs import MOE as TINY

HIDDEN, TOKENS, DEVICES = 16, 1100, 8
CONFIGS = {
    "latent": dataclasses.replace(TINY, num_experts=16, experts_per_token=4, shared_size=16, intermediate_size=8),
    "gated": dataclasses.replace(
        TINY, num_experts=8, experts_per_token=4, router="softmax", num_groups=1, top_groups=1,
        latent_size=None, gated=True, activation="silu", shared_size=0,
    ),
}  # fmt: skip


class Valid(NamedTuple):
    """All that experts ask of a layout."""

    valid: Any
    adapter: Any = None


def made(name, bias=None):
    """A layer and its model. `bias` is added to the router's scores of experts."""
    config = HybridConfig(family="t", vocab_size=64, hidden_size=HIDDEN, pattern=MOE, norm_eps=1e-5, moe=CONFIGS[name])
    moe, _ = random_module(lambda: MoE(config.moe, HIDDEN, rngs=nnx.Rngs(0), dtype=jnp.float32), scale=0.3)
    if bias is not None:
        moe.router.correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return moe, config


def run(moe, config, x, valid, mesh):
    divided = ShardedModule(moe, mixer_placements(config, MOE, 0))
    graph, state = nnx.split(moe)

    def layer(state, x, valid):
        modules = {"moe": dataclasses.replace(divided, module=nnx.merge(graph, state))}
        return across(config, modules, lambda m, layout, s, x: m["moe"](x, layout, s), Valid(valid), None, x)[0]

    with use_mesh(mesh):
        return jax.jit(layer).lower(state, x, valid).compile(), (state, x, valid)


@pytest.mark.parametrize("lot", ["even", "two have most", "one has all"])
@pytest.mark.parametrize("name", CONFIGS)
def test_divided_experts_give_what_all_give(name, lot):
    """However the tokens choose: with all on one device, that one takes all of them piece by piece."""
    config = CONFIGS[name]
    share = config.num_experts // DEVICES
    bias = None
    if config.router == "sigmoid" and lot != "even":
        liked = 2 * share if lot == "two have most" else share
        bias = np.where(np.arange(config.num_experts) < liked, 10.0, 0.0)
    moe, model = made(name, bias)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32)
    if config.router == "softmax" and lot != "even":
        x = jnp.asarray(np.tile(x[:1] if lot == "one has all" else x[:2], (TOKENS, 1))[:TOKENS])
    valid = jnp.arange(TOKENS) < TOKENS - 60
    rows = TOKENS * config.experts_per_token
    assert rows_at_once(rows, share, config.num_experts) < rows // 2
    program, arguments = run(moe, model, x, valid, make_mesh(DEVICES))
    expected, same = run(moe, model, x, valid, None)
    got, whole = (np.asarray(p(*a))[:-60] for p, a in ((program, arguments), (expected, same)))
    np.testing.assert_allclose(got, whole, atol=3e-5 * np.abs(whole).max())
    text = program.as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1


def test_no_piece_is_larger_than_what_it_replaces():
    for rows in (64, 5000, 20480, 45056):
        for experts in (8, 72, 512):
            for devices in (1, 2, 4, 8):
                at_once = rows_at_once(rows, experts // devices, experts)
                assert at_once == rows or (2 * at_once <= rows and at_once * devices >= 1.5 * rows)
    assert rows_at_once(20480, 64, 512) == 3840
    assert rows_at_once(640, 64, 512) == 640
