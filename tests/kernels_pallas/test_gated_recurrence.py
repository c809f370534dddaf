"""What lies between a recurrent layer's projections in decode, against its definition, for any implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_calls import channels_of, gated_step, width_of
from model_shapes import DELTA, GATED
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted
from recurrence_cases import fill, tails
from test_recurrence_replay import row, where

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.gated_recurrence import DeltaGates, Mamba2Gates, Windows, gated_replay, gated_update, reference
from kernels_pallas.places import Rows
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

STEPS, SLOTS, TAILS = 3, 14, 9
MAMBA = [dataclasses.replace(s.small(), interval=8) for s in GATED]
# A few heads of each kind of grouping, with keys in one piece and in two.
ERASING = [
    dataclasses.replace(
        s, heads=2 * s.heads // s.groups, groups=2, head_dim=16, state=24 if s.state % 64 else 16, interval=8
    )
    for s in DELTA[1:5]
]
SHAPES = [*MAMBA, *ERASING]
PLAIN = MAMBA[0], ERASING[0]
# Rows that continue, are fresh, end before the last step, have no token, and write the slot that they read after the
# first step, with others after it.
ROWS = Rows(
    np.array([1, 0, 2, 3, 4], np.int32), np.array([[5, 6, 7], [8, 0, 9], [10, 11, 0], [0, 0, 0], [4, 0, 12]], np.int32)
)
VALID = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
# Far behind an anchor, right after it, one token after it, fresh with and without a tail, across a boundary with and
# without a slot for its state, onto an anchor between boundaries with and without inputs since, and padding.
ANCHORED = [
    row(1, 1, 8, 14, 3, 8),
    row(2, 2, 8, 8, 2, 9),
    row(3, 3, 16, 17, 1, 0),
    row(0, 4, 0, 0, 3, 10),
    row(0, 5, 0, 2, 3, 11),
    row(4, 6, 8, 15, 3, 0),
    row(5, 7, 5, 7, 2, 5),
    row(6, 8, 7, 7, 3, 6),
    row(),
]
EACH = pytest.mark.parametrize("implementation", ["xla", "pallas_gpu_interpreted"])
BFLOAT16 = pytest.mark.parametrize(
    "states", some_slow([jnp.bfloat16, np.float32], np.float32), ids=["bfloat16", "float32"]
)
KINDS = pytest.mark.parametrize("shape", PLAIN, ids=["mamba2", "delta"])


def layer(draw, shape, rows, steps, dtype=np.float32):
    shapes = gated_step(dataclasses.replace(shape, rows=rows, steps=steps), dtype)
    projections, weights = draw.like((shapes["projections"], shapes["weights"]))
    return projections._replace(strength=2 * projections.strength), weights


def gates(shape):
    if not shape.erase:
        return Mamba2Gates((1e-3, 0.7), 1e-5, shape.norm_before_gate)
    if shape.by_channel:
        return DeltaGates(beta_scale=1.0, log_decay_bound=-5.0, activation="sigmoid", eps=1e-5)
    return DeltaGates(beta_scale=2.0, log_decay_bound=None, activation="silu", eps=1e-6)


def stores(draw, shape, dtype=np.float32, states=np.float32):
    """States, and windows of values and of vectors, with NaN in slot 0."""
    windows = [(width_of(shape) - 1, channels) for channels in channels_of(shape)]
    found = [draw.normal(SLOTS, *shape.state_shape, dtype=states)]
    found += [draw.normal(SLOTS, *sizes, dtype=dtype) for sizes in windows]
    for store in found:
        store[0] = np.nan
    return found


def masked(projections, valid, value):
    for v in projections:
        if v is not None:
            v[~valid] = value


def run(operation, implementation, shape, *arguments, **more):
    return jitted(operation, implementation=implementation, gates=gates(shape))(*arguments, **more)


def check_update(implementation, shape, dtype=np.float32, states=np.float32):
    draw = Draw()
    (projections, weights), (store, *windows) = layer(draw, shape, 5, STEPS, dtype), stores(draw, shape, dtype, states)
    masked(projections, VALID, np.nan)
    arguments = projections, weights, store, Windows(*windows), ROWS
    y, after, new = run(gated_update, implementation, shape, *arguments, valid=VALID)
    masked(projections, VALID, 0)
    want_y, want, want_windows = reference.gated_update(*arguments, valid=VALID, gates=gates(shape))
    assert y.dtype == dtype
    assert_close(y[VALID], want_y[VALID], dtype, None if dtype == jnp.bfloat16 else 1e-4)
    assert_close(after[1:], want[1:], jnp.bfloat16 if jnp.bfloat16 in (dtype, states) else dtype)
    untouched = np.setdiff1d(np.arange(SLOTS), ROWS.write_slot)
    assert_same_bits(after[untouched], store[untouched])
    for ours, theirs in zip(new[:2], want_windows, strict=True):
        assert_same_bits(ours[1:], theirs[1:])


def check_replay(implementation, shape, dtype=np.float32, states=np.float32):
    """With NaN in slot 0, in tail 0 and where no token since the anchor is."""
    draw, places = Draw(), where(ANCHORED, shape)
    (projections, weights), (store, *windows) = (
        layer(draw, shape, len(ANCHORED), STEPS, dtype),
        stores(draw, shape, dtype, states),
    )

    def ring(entries, channels):
        found = np.full((TAILS, entries, channels), np.nan, dtype)
        for which, first, last in zip(places.tail_id, places.anchor_length, places.length, strict=True):
            for n in range(max(first, last - entries + STEPS), last):
                found[which, n % entries] = draw.normal(channels).astype(dtype)
        return found

    tail = fill(draw, tails(shape, TAILS, 16, dtype), places)
    windows = Windows(*windows, *(ring(8, window.shape[2]) for window in windows))
    valid = np.arange(STEPS) < places.num_tokens[:, None]
    masked(projections, valid, np.nan)
    arguments = projections, weights, store, tail, windows, places
    y, after, new_tail, new = run(gated_replay, implementation, shape, *arguments)
    want_y, want, want_tail, want_windows = reference.gated_replay(*arguments, gates=gates(shape))
    rounded = jnp.bfloat16 if jnp.bfloat16 in (dtype, states) else dtype
    assert y.dtype == dtype
    assert_close(y[valid], want_y[valid], dtype, None if dtype == jnp.bfloat16 else 1e-4)
    written = [8, 11, 5, 6]  # by the first row, by a fresh one, and over anchors
    assert_close(after[written], want[written], rounded)
    untouched = np.setdiff1d(np.arange(1, SLOTS), written)
    for ours, theirs in zip((after, *new[:2]), (store, *windows[:2]), strict=True):
        assert_same_bits(ours[untouched], theirs[untouched])
    for ours, theirs in zip(jax.tree.leaves(new_tail), jax.tree.leaves(want_tail), strict=True):
        assert_close(np.nan_to_num(ours[1:]), np.nan_to_num(theirs[1:]), rounded)
        assert_same_bits(np.isnan(ours[1:]), np.isnan(theirs[1:]))
    for ours, theirs in zip(new, want_windows, strict=True):
        assert_same_bits(ours[1:], theirs[1:])


@pytest.mark.smoke
@EACH
@pytest.mark.parametrize("check", [check_update, check_replay])
@pytest.mark.parametrize("shape", some_slow(SHAPES, *MAMBA[1:4:2], *ERASING[1:3]), ids=lambda s: s.name)
def test_equals_definition(implementation, check, shape):
    check(implementation, shape)


@EACH
@pytest.mark.parametrize("check", [check_update, check_replay])
@BFLOAT16
@KINDS
def test_bfloat16(implementation, check, states, shape):
    check(implementation, shape, jnp.bfloat16, states)


@EACH
@pytest.mark.parametrize("check", some_slow([check_update, check_replay], check_replay))
def test_three_groups_of_odd_width(implementation, check):
    check(implementation, dataclasses.replace(PLAIN[0], heads=9, groups=3, head_dim=24))


@KINDS
def test_in_place(shape):
    draw = Draw()
    inputs, (store, *windows) = layer(draw, shape, 2, 1), stores(draw, shape)
    rows = Rows(ROWS.read_slot[:2], ROWS.write_slot[:2, :1])

    def update(stores, inputs, rows, valid):
        y, *after = gated_update(*inputs, *stores, rows, valid=valid, gates=gates(shape), implementation="xla")
        return tuple(after), y

    donated = jax.tree.map(lambda v: np.concatenate([v] * 8), (store, Windows(*windows)))
    assert_in_place(update, donated, inputs, rows, VALID[:2, :1])


@pytest.mark.parametrize("check", [check_update, check_replay])
@KINDS
def test_says_what_it_cannot_run(check, shape):
    with pytest.raises(UnsupportedError, match="keys have a size of 20, not a multiple of 8"):
        check("pallas_gpu_interpreted", dataclasses.replace(shape, state=20))
