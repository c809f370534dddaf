"""The convolution against its definition, and what holds for any implementation of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import check_values
from model_shapes import CONVOLUTIONS
from operation_checks import ELSEWHERE, Draw, assert_close, assert_same_gradients, ints, jitted, needs_native

from kernels_pallas.causal_conv1d import causal_conv1d_sequence, reference
from kernels_pallas.places import Packed, Rows, Tiles
from mamba_jax.kernel_check.calls import NAMES

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in CONVOLUTIONS]
PLAIN = SHAPES[0]
PREFILL, UPDATE = "causal_conv1d_prefill", "causal_conv1d_update"


def weights(draw, shape, dtype=np.float32):
    bias = draw.normal(shape.channels, dtype=dtype) if shape.bias else None
    return draw.normal(shape.channels, shape.width, dtype=dtype), bias


def windows(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.width - 1, shape.channels, dtype=dtype)
    store[0] = np.nan
    return store


def packed(lengths, reads, tile_size, first_slot, padding=0):
    """Rows of these lengths one after the other, each cut into tiles whose windows go to slots from first_slot on, then
    padding: tokens, a row and a tile of nothing.
    """
    starts = np.cumsum([0, *lengths])
    token_row = np.repeat(np.arange(len(lengths)), lengths)
    tile_row, tile_end = [], []
    for row, length in enumerate(lengths):
        ends = [*range(tile_size, length, tile_size), length]
        tile_row += [row] * len(ends)
        tile_end += ends
    write = list(range(first_slot, first_slot + len(tile_row)))
    return Packed(
        token_row=ints([*token_row, *[len(lengths)] * padding]), token_in_tiles=None, row_start=ints(starts),
        read_slot=ints([*reads, 0]), tile_row=ints([*tile_row, len(lengths)]), tile_end=ints([*tile_end, 0]),
        tile_tokens=None, tile_valid=None, tiles=Tiles(None, None, ints([*write, 0])),
    )  # fmt: skip


# The name under which schedule-invariant programs choose it.
NATIVE = pytest.param("invariant", marks=needs_native)
EACH = pytest.mark.parametrize("implementation", ["xla", NATIVE])


def check(implementation, form, *given, tokens=None, activation="silu"):
    """A call against its definition, of the first `tokens` outputs."""
    values = dict(zip(NAMES[form].split(), given, strict=True), activation=activation)
    padding = None if tokens is None else np.arange(len(given[0])) >= tokens
    dtype = given[0].dtype
    y, _ = check_values(form, values, implementation, dtype=dtype, states=dtype, padding=padding)
    assert np.isfinite(y.astype(np.float32)).all()


@pytest.mark.smoke("implementation")
@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_prefill_equals_definition(implementation, shape):
    # Rows of one token, which write the slot that they read, of fewer than the window, of several tiles; continued and
    # fresh; then padding.
    draw, tile = Draw(), shape.tile_size
    lengths = [1, max(shape.width - 2, 1), 2 * tile + 1, tile, 2]
    places = packed(lengths, [5, 0, 2, 3, 0], tile, first_slot=5, padding=3)
    x, store, layer = draw.normal(sum(lengths) + 3, shape.channels), windows(draw, shape, 14), weights(draw, shape)
    x[-3:] = 0
    check(implementation, PREFILL, x, *layer, store, places, tokens=sum(lengths))


@pytest.mark.smoke("implementation")
@pytest.mark.parametrize("implementation", ["xla", NATIVE, ELSEWHERE])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: s.name)
@pytest.mark.parametrize("steps", [1, 4])
def test_update_equals_definition(implementation, shape, steps):
    draw = Draw()
    store, x, layer = windows(draw, shape, 16), draw.normal(3, steps, shape.channels), weights(draw, shape)
    places = Rows(ints([1, 0, 3]), draw.slots(16, 3, steps))
    places.write_slot[0, -1] = 0
    check(implementation, UPDATE, x, *layer, store, places)


@EACH
@pytest.mark.parametrize(("dtype", "activation"), [(jnp.bfloat16, "silu"), (np.float32, None)])
def test_bfloat16_and_no_activation(implementation, dtype, activation):
    draw, options = Draw(), {"activation": activation}
    store, layer = windows(draw, PLAIN, 4, dtype), weights(draw, PLAIN, dtype)
    x, places = draw.normal(5, PLAIN.channels, dtype=dtype), packed([5], [1], 4, first_slot=2)
    check(implementation, PREFILL, x, *layer, store, places, **options)
    check(implementation, UPDATE, x[None, :2], *layer, store, Rows(ints([1]), ints([[2, 3]])), **options)
    y = jitted(causal_conv1d_sequence, implementation=implementation, **options)(x[None], *layer)
    assert_close(y, reference.causal_conv1d_sequence(x[None], *layer, **options), dtype)


@EACH
@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda s: s.name)
def test_sequence(implementation, shape):
    draw = Draw()
    run, layer = jitted(causal_conv1d_sequence, implementation=implementation), weights(draw, shape)
    for length in (1, 2, 17):
        x = draw.normal(2, length, shape.channels)
        assert_close(run(x, *layer), reference.causal_conv1d_sequence(x, *layer))


def test_sequence_gradients():
    draw = Draw()
    x, (weight, bias) = draw.normal(2, 9, PLAIN.channels), weights(draw, PLAIN)

    def plain(x, weight, bias):
        inputs = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        seen = jnp.stack([inputs[:, t : t + 4] for t in range(9)], axis=1)  # [batch, length, width, channels]
        return jax.nn.silu(jnp.einsum("blwc,cw->blc", seen, weight) + bias)

    assert_same_gradients(partial(causal_conv1d_sequence, implementation="xla"), plain, (x, weight, bias))
