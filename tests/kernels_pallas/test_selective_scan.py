"""The selective scan and its update against their definitions, and what holds for any implementation of them.

Kernels run in Pallas' interpreter.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import ELSEWHERE, Draw, assert_close, assert_in_place, assert_same_bits, form, jitted, on_device

from benchmarks.kernels.workloads import SELECTIVE
from kernels_pallas.places import Rows, Tiles
from kernels_pallas.selective_scan import (
    reference,
    selective_scan,
    selective_scan_sequence,
    selective_update,
)
from tests.support.selection import slow

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in SELECTIVE]
ODD = next(s for s in SHAPES if s.name == "27 channels, states of 5")
SIZES = pytest.mark.parametrize("shape", [ODD, *(slow(s) for s in SHAPES if s is not ODD)], ids=lambda s: s.name)
KERNELS = ("pallas_tpu_interpreted", "pallas_gpu_interpreted")
SCANS = pytest.mark.parametrize("implementation", ["xla", ELSEWHERE, *KERNELS])
UPDATES = pytest.mark.parametrize("implementation", ["xla", ELSEWHERE, *KERNELS])
DTYPES = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def sized(shape, implementation):
    """The shape, or what Triton has in its place: the number of entries of a state is a power of two."""
    if not implementation.startswith("pallas_gpu"):
        return shape
    return dataclasses.replace(shape, state=1 << (shape.state - 1).bit_length())


def layer(draw, shape, *lead, dtype=np.float32):
    """x, dt, a, b, c, d for tokens [*lead]."""
    return (
        draw.normal(*lead, shape.inner, dtype=dtype),
        draw.positive(*lead, shape.inner, scale=0.3),
        -draw.positive(shape.state, shape.inner),
        draw.normal(*lead, shape.state, dtype=dtype),
        draw.normal(*lead, shape.state, dtype=dtype),
        draw.normal(shape.inner),
    )


def states(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.state, shape.inner, dtype=dtype)
    store[0] = np.nan
    return store


def tiles(first, read, write):
    return Tiles(np.array(first, bool), np.array(read, np.int32), np.array(write, np.int32))


def rows(read, write):
    return Rows(np.array(read, np.int32), np.array(write, np.int32))


def pad(inputs, tile, start):
    """NaN from token `start` of a tile or row on, with dt = 0."""
    x, dt, _, b, c, _ = inputs
    dt[tile, start:] = 0
    for v in (x, b, c):
        v[tile, start:] = np.nan


@pytest.mark.smoke
@SCANS
@SIZES
def test_scan_equals_definition(implementation, shape):
    # A continued row of three tiles (the last one short), a fresh row of one, a padding tile, a continued row.
    draw, shape = Draw(), sized(shape, implementation)
    inputs, store = layer(draw, shape, 6, shape.tile_size), states(draw, shape, 9)
    pad(inputs, 2, shape.tile_size // 2 + 1)
    pad(inputs, 4, 0)
    places = tiles([1, 0, 0, 1, 1, 1], [3, 0, 0, 0, 0, 5], [0, 7, 1, 2, 0, 8])
    y, after = jitted(selective_scan, implementation=implementation)(*inputs, store, places)
    want_y, want = reference.selective_scan(*inputs, store, places)
    assert_close(y, want_y)
    assert_close(after[1:], want[1:])
    assert_same_bits(after[[3, 4, 5, 6]], store[[3, 4, 5, 6]])


@SCANS
@DTYPES
def test_cutting_between_tiles_changes_no_bit_and_slots_may_be_shared(implementation, dtype):
    scan = jitted(selective_scan, implementation=implementation)
    draw, odd = Draw(), sized(ODD, implementation)
    inputs, store = layer(draw, odd, 4, odd.tile_size, dtype=dtype), states(draw, odd, 5, dtype)
    y, after = scan(*inputs, store, tiles([1, 0, 0, 1], [2, 0, 0, 2], [0, 0, 3, 4]))
    want_y, want = reference.selective_scan(*inputs, store, tiles([1, 0, 0, 1], [2, 0, 0, 2], [0, 0, 3, 4]))
    assert_close(y, want_y, dtype)
    assert_close(after[1:], want[1:], dtype)
    split, parts, read = store, [], 2
    for tile in range(3):
        x, dt, a, b, c, d = inputs
        one = (x[[tile]], dt[[tile]], a, b[[tile]], c[[tile]], d)
        part, split = scan(*one, split, tiles([1], [read], [3]))
        parts.append(part)
        read = 3
    if implementation == "pallas_gpu_interpreted":
        # The interpreter compiles a program for each grid, and XLA:CPU may fuse one's multiplications with additions.
        assert_close(np.concatenate(parts), y[:3], tolerance=1e-6 if dtype == np.float32 else 1e-2)
        assert_close(split[3], after[3], tolerance=1e-6 if dtype == np.float32 else 1e-2)
    else:
        assert_same_bits(np.concatenate(parts), y[:3])
        assert_same_bits(split[3], after[3])


@SCANS
def test_padding_leaves_the_state_bitwise(implementation):
    scan = jitted(selective_scan, implementation=implementation)
    draw, odd = Draw(), sized(ODD, implementation)
    inputs, store = layer(draw, odd, 2, odd.tile_size), states(draw, odd, 5)
    pad(inputs, 0, 0)
    pad(inputs, 1, 0)
    y, after = scan(*inputs, store, tiles([1, 0], [2, 0], [3, 4]))
    assert_same_bits(after[3], store[2])
    assert_same_bits(after[4], store[2])
    assert (y == 0).all()


@pytest.mark.parametrize("length", [1, 31, 70])
@pytest.mark.parametrize("initial", [False, True])
def test_sequences_of_any_length(length, initial):
    draw = Draw()
    inputs, state = layer(draw, ODD, 2, length), draw.normal(2, ODD.state, ODD.inner)
    given = {"initial_state": state} if initial else {}
    y, after = jitted(selective_scan_sequence)(*inputs, **given)
    want_y, want = reference.selective_scan_sequence(*inputs, **given)
    assert_close(y, want_y)
    assert_close(after, want)


def test_gradients_are_those_of_a_loop_over_tokens():
    inputs = on_device(layer(Draw(), ODD, 1, 40))

    def by_tokens(x, dt, a, b, c, d):
        def token(state, inputs):
            x, dt, b, c = inputs
            state = jnp.exp(dt * a) * state + dt * x * b[:, None]
            return state, (state * c[:, None]).sum(0) + d * x

        out = jax.lax.scan(token, jnp.zeros((ODD.state, ODD.inner)), (x[0], dt[0], b[0], c[0]))[1]
        return jnp.sin(out).sum()

    def by_scan(*inputs):
        return jnp.sin(selective_scan_sequence(*inputs)[0]).sum()

    found, expected = (jax.jit(jax.grad(f, argnums=tuple(range(6))))(*inputs) for f in (by_scan, by_tokens))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


@pytest.mark.smoke
@UPDATES
@DTYPES
@SIZES
def test_update_equals_definition(implementation, dtype, shape):
    draw, shape = Draw(), sized(shape, implementation)
    slots = shape.rows * (shape.steps + 1) + 3
    inputs, store = layer(draw, shape, shape.rows, shape.steps, dtype=dtype), states(draw, shape, slots, dtype)
    places = draw.slots(slots, shape.rows, shape.steps + 1)
    read, write = places[:, 0], places[:, 1:]
    if shape.rows > 2:
        read[1], write[-1] = 0, 0  # a fresh row and one that keeps nothing
        write[2, -1] = read[2]  # one that writes the slot that it reads
    y, after = jitted(selective_update, implementation=implementation)(*inputs, store, rows(read, write))
    want_y, want = reference.selective_update(*inputs, store, rows(read, write))
    assert y.dtype == after.dtype == dtype
    assert_close(y, want_y, dtype)
    assert_close(after[1:], want[1:], dtype)
    untouched = np.setdiff1d(np.arange(slots), write)
    assert_same_bits(after[untouched], store[untouched])


@UPDATES
@DTYPES
def test_padding_and_steps_in_several_calls(implementation, dtype):
    update = jitted(selective_update, implementation=implementation)
    draw, odd = Draw(), sized(ODD, implementation)
    inputs, store = layer(draw, odd, 2, 3, dtype=dtype), states(draw, odd, 8, dtype)
    pad(inputs, 0, 2)
    y, after = update(*inputs, store, rows([1, 0], [[2, 3, 4], [5, 6, 7]]))
    # Not the same bits: XLA:CPU may compute the state anew for each of the two writes, with instructions of its choice.
    assert_close(after[4], after[3], dtype, tolerance=1e-6 if dtype == np.float32 else 1e-2)
    assert (y[0, 2] == 0).all()
    x, dt, a, b, c, d = inputs
    read, split, write = np.array([1, 0]), store, np.array([[2, 3, 4], [5, 6, 7]])
    for t in range(3):
        at = slice(t, t + 1)
        _, split = update(x[:, at], dt[:, at], a, b[:, at], c[:, at], d, split, rows(read, write[:, at]))
        read = write[:, t]
    assert_close(split[1:], after[1:], dtype, tolerance=1e-6 if dtype == np.float32 else 1e-2)


@pytest.mark.parametrize("implementation", [KERNELS[0], slow(KERNELS[1])])
@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
def test_kernels_with_several_blocks_of_channels(implementation, store, monkeypatch):
    """Also tiles of several parts and bodies of the kernel's loop, and a first tile that continues nothing: zeros."""
    monkeypatch.setattr("kernels_pallas.selective_scan.pallas_tpu.BLOCK_BYTES", 1)
    monkeypatch.setattr("kernels_pallas.selective_scan.pallas_tpu.TOGETHER", 128)
    monkeypatch.setattr("kernels_pallas.selective_scan.pallas_tpu.LONGEST", 16)
    shape, draw = dataclasses.replace(ODD, inner=384, state=8, tile_size=48), Draw()
    inputs, store = layer(draw, shape, 3, 48), states(draw, shape, 6, store)
    pad(inputs, 1, 30)
    places = tiles([0, 0, 1], [3, 0, 2], [0, 4, 5])
    y, after = jitted.__wrapped__(selective_scan, implementation=implementation)(*inputs, store, places)
    want_y, want = reference.selective_scan(*inputs, store, places)
    assert_close(y, want_y, store.dtype)
    assert_close(after[1:], want[1:], store.dtype)
    places = rows([0, 2, 3], [[1] + [0] * 47, [0] * 47 + [2], [0] * 47 + [4]])
    y, after = jitted.__wrapped__(selective_update, implementation=implementation)(*inputs, store, places)
    want_y, want = reference.selective_update(*inputs, store, places)
    assert_close(y, want_y, store.dtype)
    assert_close(after[1:], want[1:], store.dtype)


def test_a_scan_of_decode_steps_is_the_scan():
    draw = Draw()
    inputs, store = layer(draw, ODD, 2, 6), states(draw, ODD, 3)
    y, after = jitted(selective_update)(*inputs, store, rows([0, 0], [[0] * 5 + [1], [0] * 5 + [2]]))
    want_y, want = jitted(selective_scan_sequence)(*inputs)
    assert_close(y, want_y)
    assert_close(after[1:], want)


@DTYPES
def test_in_place(dtype):
    draw = Draw()

    def scan(store, inputs, places):
        return selective_scan(*inputs, store, places)

    def update(store, inputs, places):
        return selective_update(*inputs, store, places)

    store = np.zeros((8_000_000 // (ODD.state * ODD.inner), ODD.state, ODD.inner), dtype)
    assert_in_place(scan, store, layer(draw, ODD, 2, ODD.tile_size, dtype=dtype), tiles([1, 1], [1, 2], [3, 4]))
    assert_in_place(update, store, layer(draw, ODD, 3, 2, dtype=dtype), rows([1, 2, 3], [[4, 5], [6, 7], [8, 9]]))


def test_no_array_of_all_tokens_states_is_held():
    shape, tiles_of_prompt = SHAPES[0], 64
    inputs = layer(Draw(), shape, tiles_of_prompt, shape.tile_size)
    store = states(Draw(), shape, 4)
    places = tiles([1] + [0] * (tiles_of_prompt - 1), [1] * tiles_of_prompt, [2] + [0] * (tiles_of_prompt - 1))
    all_states = tiles_of_prompt * shape.tile_size * shape.state * shape.inner * 4
    for implementation in ("xla", ELSEWHERE):

        def run(store, inputs, places, implementation=implementation):
            with form(implementation) as name:
                return selective_scan(*inputs, store, places, implementation=name)

        compiled = jax.jit(run).lower(*on_device((store, inputs, places))).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < all_states / 4


def test_refuses_shapes_that_do_not_fit():
    x, dt, a, b, c, d = on_device(layer(Draw(), ODD, 2, 8))
    with pytest.raises(ValueError, match="b has shape"):
        selective_scan_sequence(x, dt, a, b[:, :, :2], c, d)
