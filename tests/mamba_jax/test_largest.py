"""The largest of logits, of one device and of parts on several: what numpy finds in all of them together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.sampling import largest
from mamba_jax.sharding import make_mesh
from mamba_jax.sharding.axis import split_last, use_mesh

VOCAB = 8 * 300  # each of eight devices has more than one block of those that are looked at first


def found(logits, shards):
    mesh = make_mesh(shards) if shards > 1 else None
    with use_mesh(mesh):
        index, finite = jax.jit(lambda logits: largest(split_last(logits)))(jnp.asarray(logits, jnp.float32))
    assert index.dtype == jnp.int32
    return np.asarray(index), np.asarray(finite)


def rows():
    """Random ones of few different values, so that most have their largest on several devices; then special ones."""
    rng = np.random.default_rng(1)
    logits = rng.integers(-40, 4, (40, VOCAB)).astype(np.float32)
    logits[:8] = rng.normal(size=(8, VOCAB))
    logits[8] = 0
    logits[9, ::2] = -0.0  # equal to 0
    logits[9, 1::2] = 0
    logits[10] = -np.inf
    logits[11, 1700] = np.inf
    logits[12, [900, 2300]] = np.nan  # which one is found means nothing, but that they are not finite
    logits[13, [300, 2399]] = np.inf
    logits[14] = 0
    logits[14, [599, 600, 601]] = np.float32(7), np.nextafter(np.float32(7), np.float32(8)), 7  # a tie but for a digit
    logits[15] = -1e-40  # subnormal: it may count as zero, but the same everywhere
    return logits


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_finds_what_numpy_finds(shards):
    logits, part = rows(), VOCAB // shards
    # The same largest at one place of each of two parts: the first wins, whichever devices they are on.
    pairs = np.full((shards * (shards - 1), VOCAB), -3.0, np.float32)
    for row, (i, j) in zip(pairs, itertools.permutations(range(shards), 2), strict=True):
        row[[i * part + 5, j * part + 2]] = 1.5
    logits = np.concatenate([logits, pairs])
    for size in (VOCAB, VOCAB - 1):  # a vocabulary that divides, and one that does not
        some = logits[:, :size]
        index, finite = found(some, shards)
        numbers = ~np.isnan(some).any(-1)
        np.testing.assert_array_equal(index[numbers], some.argmax(-1)[numbers])
        np.testing.assert_array_equal(finite, np.isfinite(some).all(-1))
        assert numbers.sum() == len(logits) - 1


def test_devices_exchange_only_what_they_have_found():
    mesh = make_mesh(4)
    with use_mesh(mesh):
        run = jax.jit(lambda logits: largest(split_last(logits)))
        text = run.lower(jax.ShapeDtypeStruct((16, VOCAB), jnp.float32)).compile().as_text()
    exchanged = [line for line in text.splitlines() if " all-gather(" in line or " all-reduce(" in line]
    assert len(exchanged) == 1
    assert "s32[4,3,16]" in exchanged[0] or "s32[12,16]" in exchanged[0]
