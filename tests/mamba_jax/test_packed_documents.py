"""Packed documents give the results and gradients of documents that run one by one, in every mixer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import LatentAttentionConfig
from mamba_jax.config.channel_recurrence import ShortConvConfig
from mamba_jax.config.linear_recurrence import DeltaConfig
from mamba_jax.layout import PackedLayout, SequenceLayout
from mamba_jax.modules.attention import Attention, LatentAttention
from mamba_jax.modules.conv import ShortConv
from mamba_jax.modules.delta import Delta
from mamba_jax.modules.mamba import Mamba
from tests.support.models.random_models import random_module
from tests.support.models.tiny_configs import ATTENTION, HIDDEN, MAMBA

DELTA = DeltaConfig(num_heads=4, head_dim=8, state_size=12, num_groups=2, conv_width=4, norm_eps=1e-5)
LENGTHS = (3, 41, 1, 20)  # within a block of the scan, across blocks, shorter than the convolution
MIXERS = {
    "mamba": lambda **o: Mamba(MAMBA, HIDDEN, **o),
    "delta": lambda **o: Delta(DELTA, HIDDEN, **o),
    "delta by channel": lambda **o: Delta(
        dataclasses.replace(DELTA, num_groups=4, decay="channel", gate_rank=6, output_gate="sigmoid"), HIDDEN, **o
    ),
    "short convolution": lambda **o: ShortConv(ShortConvConfig(channels=HIDDEN, conv_width=3), HIDDEN, **o),
    "attention": lambda **o: Attention(ATTENTION, HIDDEN, **o),
    "latent attention": lambda **o: LatentAttention(
        LatentAttentionConfig(num_heads=2, latent_size=8, key_size=4, shared_key_size=4, value_size=6, norm_eps=1e-5),
        HIDDEN,
        **o,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_do_not_see_each_other(name):
    mixer, _ = random_module(lambda: MIXERS[name](rngs=nnx.Rngs(0), dtype=jnp.float32), scale=0.3)
    graph, weights = nnx.split(mixer)
    x = jax.random.normal(jax.random.key(0), (sum(LENGTHS), HIDDEN))
    ends = np.cumsum(LENGTHS)

    def loss(weights, x, layouts):
        """The loss over pieces of x, each with its layout."""
        outputs = []
        for layout in layouts:
            tokens = layout.positions.shape[0]
            outputs.append(nnx.merge(graph, weights)(x[:tokens], layout, None)[0])
            x = x[tokens:]
        y = jnp.concatenate(outputs)
        return jnp.sin(3 * y).sum(), y

    starts = jnp.zeros(len(x), bool).at[np.array([0, *ends[:-1]])].set(True)
    together = PackedLayout.of_documents(starts, documents=5, longest=48)
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    packed = run(weights, x, [together])
    alone = run(weights, x, [SequenceLayout.of(1, length) for length in LENGTHS])
    joined = run(weights, x, [SequenceLayout.of(1, len(x))])
    assert np.abs(packed[0][1] - joined[0][1]).max() > 1e-2  # without boundaries the result is another
    for one, other in zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * float(np.abs(other).max() + 1))


def test_documents_beyond_the_maximum_are_nan():
    starts = jnp.array([True, False, False, True, False, True])
    layout = PackedLayout.of_documents(starts, documents=2, longest=2)
    x = jnp.arange(1.0, 7.0)
    np.testing.assert_array_equal(layout.by_sequence(x), [[1, 2], [4, 5]])
    np.testing.assert_array_equal(layout.by_token(layout.by_sequence(x)), [1, 2, np.nan, 4, 5, np.nan])
    np.testing.assert_array_equal(layout.positions, [0, 1, -1, 0, 1, -1])
