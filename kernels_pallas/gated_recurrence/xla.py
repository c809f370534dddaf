"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp
from jax import lax

from kernels_pallas.causal_conv1d import causal_conv1d_prefill, causal_conv1d_replay, causal_conv1d_update
from kernels_pallas.recurrence import Entry, recurrence_replay, recurrence_scan, recurrence_update


def gated_scan(zx, query, key, log_decay, strength, weights, store, windows, packed, *, gates):
    tokens, _, inner = zx.shape
    if not tokens:
        return zx[:, 1], store, windows
    # Flat: a TPU would lay out [tokens, 2, inner] anew for each half.
    z, x = jnp.split(zx.reshape(tokens, 2 * inner), 2, axis=1)
    x, windows = causal_conv1d_prefill(x, weights.value_taps, weights.value_bias, windows, packed)
    tiles = packed.tile_tokens.shape

    def by_tile(v, *shape):  # some token where there is none: the scan knows padding by its strength of 0
        return v.reshape(tokens, -1)[packed.tile_tokens].reshape(*tiles, *shape)

    entry = Entry(
        by_tile(query, *query.shape[1:]),
        by_tile(key, *key.shape[1:]),
        by_tile(x, *store.shape[1:3]),
        *(jnp.where(packed.tile_valid[..., None], v[packed.tile_tokens], 0) for v in (log_decay, strength)),
    )
    y, store = recurrence_scan(entry, store, packed.tiles, erase=False, skip=weights.skip)
    y = y.reshape(-1, inner)[packed.token_in_tiles]
    return gates.output(y, z, weights.norm, groups=key.shape[1]), store, windows


def gated_update(projections, weights, store, windows, rows, *, valid, gates):
    real = valid[..., None]
    inputs = (jnp.where(real, v, 0) for v in _of_convolutions(projections))
    value, vectors, windows = _convolved(causal_conv1d_update, inputs, weights, windows, rows)
    entry = _entry(projections, weights, value, vectors, store, gates)
    entry = entry._replace(strength=jnp.where(real, entry.strength, 0))
    y, store = recurrence_update(entry, store, rows, erase=gates.erase, skip=weights.skip)
    return _output(y, projections, weights, gates), store, windows


def gated_replay(projections, weights, store, tail, windows, places, *, gates):
    inputs = _of_convolutions(projections)
    value, vectors, windows = _convolved(causal_conv1d_replay, inputs, weights, windows, places)
    entry = _entry(projections, weights, value, vectors, store, gates)
    y, store, tail = recurrence_replay(entry, store, tail, places, erase=gates.erase, skip=weights.skip)
    return _output(y, projections, weights, gates), store, tail, windows


def _of_convolutions(projections):
    """Returns the inputs of the convolutions, [rows, steps, channels] each."""
    return projections.value, lax.collapse(projections.vectors, 2)


def _convolved(operation, inputs, weights, windows, places):
    """Returns value and vectors after a convolution, an update or a replay, and the windows."""
    (value, vectors), stores = inputs, [v for v in windows if v is not None]
    value, *of_value = operation(value, weights.value_taps, weights.value_bias, *stores[::2], places)
    vectors, *of_vectors = operation(vectors, weights.vector_taps, weights.vector_bias, *stores[1::2], places)
    return value, vectors, type(windows)(*(v for pair in zip(of_value, of_vectors, strict=True) for v in pair))


def _entry(projections, weights, value, vectors, store, gates):
    """Returns the recurrence's entry."""
    shape = *projections.vectors.shape[:2], *projections.vectors.shape[3:]
    first, second = (v.reshape(shape) for v in jnp.split(vectors, 2, axis=2))
    query, key = (first, second) if gates.query_first else (second, first)
    log_decay, strength = gates.decays_and_strengths(
        projections.decay, projections.strength, weights.a_log, weights.dt_bias
    )
    query, key = gates.vectors(query, key)
    return Entry(query, key, value.reshape(*shape[:2], *store.shape[1:3]), log_decay, strength)


def _output(y, projections, weights, gates):
    groups = projections.vectors.shape[3]
    return gates.output(y.reshape(projections.gate.shape), projections.gate, weights.norm, groups=groups)
