"""Modules against their definitions, written as loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import ACTIVATIONS, AttentionConfig, LatentAttentionConfig, MambaConfig, RopeConfig
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import parameters
from mamba_jax.modules.attention import Attention, LatentAttention
from mamba_jax.modules.basic import Linear, RMSNorm, activation
from mamba_jax.modules.feed_forward import MoE
from mamba_jax.modules.linear_recurrence import Mamba
from tests.support.models.random_models import random_module
from tests.support.models.tiny_configs import HIDDEN, MOE


def made(kind, *args, dtype=jnp.float32, **options):
    """A module with random values everywhere, also where a model starts with ones or zeros; and those in numpy."""
    return random_module(lambda: kind(*args, rngs=nnx.Rngs(0), dtype=dtype, **options), scale=0.3)


def run(mixer, x, **options):
    """The mixer over one whole sequence, compiled as one program."""
    return jax.jit(lambda m, x, o: m(x, SequenceLayout.of(1, len(x)), None, **o)[0])(mixer, x, options)


def tokens(count, width=HIDDEN, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, width)), jnp.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def test_padding_does_not_reach_experts():
    moe, _ = made(MoE, MOE, HIDDEN)
    run = jax.jit(lambda m, x, lengths: m(x, SequenceLayout.of(2, 6, lengths), None)[0])
    x, lengths = tokens(12), np.array([6, 3], np.int32)
    spoiled = x.at[9:].set(jnp.nan)
    np.testing.assert_array_equal(run(moe, x, lengths)[:9], run(moe, spoiled, lengths)[:9])


def test_router_weights_are_float32_in_a_bfloat16_model():
    moe, _ = made(MoE, MOE, HIDDEN, dtype=jnp.bfloat16)
    kinds = {path: param.dtype for path, param in parameters(moe).items()}
    assert {path for path, kind in kinds.items() if kind == jnp.float32} == {"router.weight", "router.correction_bias"}
    assert run(moe, tokens(4).astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [6, 4, 3])
@pytest.mark.parametrize(("frequencies", "scale"), [((), 1.0), ((0.9, 0.4, 0.05), 1.3)])
def test_rope_turns_pairs_by_position(size, frequencies, scale):
    frequencies = frequencies[: (size + 1) // 2]
    rope = RopeConfig(theta=50.0, size=size, frequencies=frequencies, scale=scale)
    config = AttentionConfig(1, 1, 6, scale=1.0, input_size=6, rope=rope)
    attention, _ = made(Attention, config, 6)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        parameters(attention)[f"{name}.weight"][...] = jnp.eye(6)
    x = tokens(5, 6)

    def turned(v, position):
        half, out = (size + 1) // 2, v.astype(np.float64)
        for i in range(half):
            angle = position * (frequencies[i] if frequencies else 50.0 ** (-2 * i / size))
            out[i] = scale * (v[i] * np.cos(angle) - v[i + half] * np.sin(angle))
            out[i + half] = scale * (v[i + half] * np.cos(angle) + v[i] * np.sin(angle))
        return out

    x = np.asarray(x)
    q = np.array([turned(v, i) for i, v in enumerate(x)])
    scores = np.where(np.tri(5, dtype=bool), q @ q.T, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ x
    np.testing.assert_allclose(run(attention, jnp.asarray(x)), expected, atol=1e-5)


def test_latent_attention_equals_attention_with_keys_and_values_made():
    config = LatentAttentionConfig(
        num_heads=3, key_size=5, shared_key_size=4, value_size=6, latent_size=8, norm_eps=1e-3,
        query_latent_size=10,
    )  # fmt: skip
    (attention, w), length = made(LatentAttention, config, HIDDEN), 9
    x = tokens(length)
    y = run(attention, x)
    x = np.asarray(x, np.float64)
    latent, shared = np.split(x @ w["latent_proj.weight"].T, [8], axis=1)

    def norm(v, name):
        return v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-3) * w[name]

    latent = norm(latent, "norm.weight")
    read = norm(x @ w["q_latent_proj.weight"].T, "q_norm.weight")
    q, out = (read @ w["q_proj.weight"].T).reshape(length, 3, 9), []
    for h in range(3):
        k = np.concatenate([latent @ w["k_up.weight"][h].T, shared], axis=1)
        scores = np.where(np.tri(length, dtype=bool), q[:, h] @ k.T / 3, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ (latent @ w["v_up.weight"][h].T))
    np.testing.assert_allclose(y, np.concatenate(out, axis=1) @ w["o_proj.weight"].T, atol=1e-5)


@pytest.mark.parametrize("limit", [(0.0, np.inf), (0.4, 0.6)])
@pytest.mark.parametrize(("norm", "before"), [(True, False), (True, True), (False, False)])
def test_mamba_equals_the_recurrence(norm, before, limit):
    config = MambaConfig(
        num_heads=6, head_dim=4, state_size=5, num_groups=3, conv_width=3, in_bias=True, out_bias=True, dt_limit=limit,
        norm=norm, norm_before_gate=before, norm_eps=1e-4, input_multiplier=1.3, output_multiplier=0.6,
        projection_multipliers=(0.7, 1.2, 0.8, 1.5, 0.9),
    )  # fmt: skip
    (mamba, w), length = made(Mamba, config, HIDDEN), 11
    x = tokens(length)
    y = run(mamba, x)

    x = np.asarray(x, np.float64)
    times = config.projection_multipliers
    zx = np.einsum("poi,ti->tpo", w["in_proj_zx.weight"], 1.3 * x) + w["in_proj_zx.bias"]
    bc = np.einsum("poi,ti->tpo", w["in_proj_bc.weight"], 1.3 * x) + w["in_proj_bc.bias"]
    dt = times[4] * (1.3 * x @ w["in_proj_dt.weight"].T + w["in_proj_dt.bias"])
    z = times[0] * zx[:, 0]
    raw = np.concatenate([times[1] * zx[:, 1], times[2] * bc[:, 0], times[3] * bc[:, 1]], axis=1)
    kernel = np.concatenate([w["conv_x.weight"], w["conv_bc.weight"]])
    padded = np.concatenate([np.zeros((2, raw.shape[1])), raw])
    conv = sum(padded[i : i + length] * kernel[:, i] for i in range(3))
    conv = silu(conv + np.concatenate([w["conv_x.bias"], w["conv_bc.bias"]]))
    inner, b, c = np.split(conv, [24, 39], axis=1)
    dt = np.clip(np.log1p(np.exp(dt + w["dt_bias"])), *limit)
    state, out = np.zeros((6, 4, 5)), np.zeros((length, 24))
    for t in range(length):
        for h in range(6):
            u, g = inner[t].reshape(6, 4)[h], h // 2
            state[h] = np.exp(-dt[t, h] * np.exp(w["a_log"][h])) * state[h]
            state[h] += dt[t, h] * np.outer(u, b[t].reshape(3, 5)[g])
            out[t, 4 * h : 4 * h + 4] = state[h] @ c[t].reshape(3, 5)[g] + w["d"][h] * u
    if norm:
        value = (out if before else out * silu(z)).reshape(length, 3, 8)
        value = value / np.sqrt((value**2).mean(-1, keepdims=True) + 1e-4)
        out = value.reshape(length, 24) * w["norm.weight"] * (silu(z) if before else 1)
    else:
        out = out * silu(z)
    expected = 0.6 * (out @ w["out_proj.weight"].T + w["out_proj.bias"])
    np.testing.assert_allclose(y, expected, atol=2e-5)


def test_every_activation_is_there():
    x = jnp.linspace(-3, 3, 7)
    assert all(np.isfinite(activation(name)(x)).all() for name in ACTIVATIONS)
    np.testing.assert_allclose(activation("relu2")(x), np.maximum(x, 0) ** 2)


def test_norm_computes_in_float32_and_returns_the_weights_dtype():
    norm = RMSNorm(HIDDEN, 1e-5, dtype=jnp.bfloat16)
    x = 1e4 * tokens(3)  # its squares overflow nothing, but would lose all precision in bfloat16
    expected = x / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm(x), expected.astype(jnp.bfloat16))


def test_linear_with_several_output_axes_and_bias():
    (linear, w), x = made(Linear, HIDDEN, (2, 3), bias=True), tokens(4)
    expected = np.einsum("poi,ti->tpo", w["weight"], x) + w["bias"]
    np.testing.assert_allclose(linear(x), expected, atol=1e-5)
    assert linear(x.astype(jnp.bfloat16), out_dtype=jnp.float32).dtype == jnp.float32
