"""One tiny model that has every kind of sublayer, in odd sizes."""

import functools

import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.config import (
    AttentionConfig,
    HybridConfig,
    MambaConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    SharedConfig,
)
from mamba_jax.model import HybridModel

HIDDEN, VOCAB = 20, 61

MAMBA = MambaConfig(
    num_heads=6,
    head_dim=5,
    state_size=7,
    num_groups=3,
    conv_width=4,
    in_bias=True,
    projection_multipliers=(1.1, 0.9, 1.2, 0.8, 1.3),
    output_multiplier=0.7,
)
ATTENTION = AttentionConfig(
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    scale=0.3,
    input_size=HIDDEN,
    rope=RopeConfig(theta=100.0, size=4),
    key_multiplier=1.4,
)
MLP = MLPConfig(intermediate_size=28, activation="silu", gated=True, bias=True)
MOE = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    intermediate_size=10,
    activation="relu2",
    gated=False,
    router="sigmoid",
    num_groups=4,
    top_groups=2,
    normalize=True,
    scaling=1.5,
    latent_size=12,
    shared_size=14,
)

# Shared blocks see twice the hidden size, so they cannot be in the same model as other attention.
EVERYTHING = HybridConfig(
    family="test",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    pattern="M*-EP",
    norm_eps=1e-5,
    mamba=MAMBA,
    attention=ATTENTION,
    mlp=MLP,
    moe=MOE,
    embedding_multiplier=2.0,
    residual_multiplier=0.8,
    logits_multiplier=0.5,
    mtp_pattern="*E",
)
SHARED = HybridConfig(
    family="test",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    pattern="ZZZ",
    norm_eps=1e-5,
    mamba=MAMBA,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=10, scale=0.4, input_size=2 * HIDDEN),
    mlp=MLPConfig(intermediate_size=28, activation="gelu", gated=True),
    shared=SharedConfig(num_blocks=2, adapter_rank=3, attention_adapters=True),
    residual_in_fp32=True,
    tie_word_embeddings=True,
)


def random_module(make, *, scale):
    """The module that `make` makes, with random weights; and those by their paths, in float64 numpy.

    Weights are drawn by numpy: making them module by module in JAX would compile something for each shape.
    """
    graph, state = nnx.split(nnx.eval_shape(make))
    random, filled, arrays = np.random.default_rng(7), [], {}
    for path, leaf in nnx.to_flat_state(state):
        value = jnp.asarray(scale * random.normal(size=leaf.shape), leaf.dtype)
        filled.append((path, leaf.replace(value)))
        arrays[".".join(map(str, path))] = np.asarray(value, np.float64)
    return nnx.merge(graph, nnx.from_flat_state(filled)), arrays


@functools.cache
def model_of(config, dtype=jnp.float32):
    """A model with random weights everywhere."""
    return random_module(lambda: HybridModel(config, rngs=nnx.Rngs(0), dtype=dtype), scale=0.3)[0]
