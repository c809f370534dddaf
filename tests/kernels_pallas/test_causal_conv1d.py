"""The convolution against its definition, and what holds for any implementation of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_shapes import CONVOLUTIONS
from operation_checks import ELSEWHERE, Draw, assert_close, assert_in_place, assert_same_bits, jitted, on_device

from kernels_pallas import native
from kernels_pallas.causal_conv1d import causal_conv1d_prefill, causal_conv1d_sequence, causal_conv1d_update, reference
from kernels_pallas.places import Packed, Rows, Tiles
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in CONVOLUTIONS]
PLAIN = SHAPES[0]


def weights(draw, shape, dtype=np.float32):
    bias = draw.normal(shape.channels, dtype=dtype) if shape.bias else None
    return draw.normal(shape.channels, shape.width, dtype=dtype), bias


def windows(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.width - 1, shape.channels, dtype=dtype)
    store[0] = np.nan
    return store


def ints(values):
    return np.array(values, np.int32)


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


class Convolution:
    """Every implementation of the three forms."""

    implementation: str

    def check(self, operation, x, *arguments, tokens=None, **options):
        """A call against its definition, of the first `tokens` outputs."""
        y, after = jitted(operation, implementation=self.implementation)(x, *arguments, **options)
        want_y, want = getattr(reference, operation.__name__)(x, *arguments, **options)
        assert y.dtype == x.dtype
        assert_close(y[:tokens], want_y[:tokens], x.dtype)
        assert np.isfinite(y.astype(np.float32)).all()
        assert_same_bits(after, want)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, *SHAPES[1:5]), ids=lambda s: s.name)
    def test_prefill_equals_definition(self, shape):
        # Rows of one token, of fewer than the window, of several tiles; continued and fresh; then padding.
        draw, tile = Draw(), shape.tile_size
        lengths = [1, max(shape.width - 2, 1), 2 * tile + 1, tile, 2]
        places = packed(lengths, [1, 0, 2, 3, 0], tile, first_slot=5, padding=3)
        x, store, layer = draw.normal(sum(lengths) + 3, shape.channels), windows(draw, shape, 14), weights(draw, shape)
        x[-3:] = 0
        self.check(causal_conv1d_prefill, x, *layer, store, places, tokens=-3)

    def test_a_row_may_write_the_slot_it_reads(self):
        draw = Draw()
        store, x, layer = windows(draw, PLAIN, 3), draw.normal(9, PLAIN.channels), weights(draw, PLAIN)
        self.check(causal_conv1d_prefill, x, *layer, store, packed([4, 5], [1, 2], PLAIN.tile_size, first_slot=1))

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES[5:], ids=lambda s: s.name)
    @pytest.mark.parametrize("steps", [1, 4])
    def test_update_equals_definition(self, shape, steps):
        draw = Draw()
        store, x, layer = windows(draw, shape, 16), draw.normal(3, steps, shape.channels), weights(draw, shape)
        places = Rows(ints([1, 0, 3]), draw.slots(16, 3, steps))
        places.write_slot[0, -1] = 0
        self.check(causal_conv1d_update, x, *layer, store, places)

    @pytest.mark.parametrize(("dtype", "options"), [(jnp.bfloat16, {}), (np.float32, {"activation": None})], ids=str)
    def test_bfloat16_and_no_activation(self, dtype, options):
        draw = Draw()
        store, layer = windows(draw, PLAIN, 4, dtype), weights(draw, PLAIN, dtype)
        x, places = draw.normal(5, PLAIN.channels, dtype=dtype), packed([5], [1], 4, first_slot=2)
        self.check(causal_conv1d_prefill, x, *layer, store, places, **options)
        self.check(causal_conv1d_update, x[None, :2], *layer, store, Rows(ints([1]), ints([[2, 3]])), **options)
        y = jitted(causal_conv1d_sequence, implementation=self.implementation)(x[None], *layer, **options)
        assert_close(y, reference.causal_conv1d_sequence(x[None], *layer, **options), dtype)

    @pytest.mark.parametrize("shape", SHAPES[5:], ids=lambda s: s.name)
    def test_sequence(self, shape):
        draw = Draw()
        run = jitted(causal_conv1d_sequence, implementation=self.implementation)
        layer = weights(draw, shape)
        for length in (1, 2, 17):
            x = draw.normal(2, length, shape.channels)
            assert_close(run(x, *layer), reference.causal_conv1d_sequence(x, *layer))

    def test_sequence_gradients(self):
        draw = Draw()
        x, (weight, bias) = draw.normal(2, 9, PLAIN.channels), weights(draw, PLAIN)

        def plain(x, weight, bias):
            inputs = jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
            seen = jnp.stack([inputs[:, t : t + 4] for t in range(9)], axis=1)  # [batch, length, width, channels]
            return jax.nn.silu(jnp.einsum("blwc,cw->blc", seen, weight) + bias)

        def gradients(function):
            loss = jax.grad(lambda *v: jnp.sin(function(*v)).sum(), argnums=(0, 1, 2))
            return jax.jit(loss)(*on_device((x, weight, bias)))

        ours = gradients(lambda *v: causal_conv1d_sequence(*v, implementation=self.implementation))
        for actual, expected in zip(ours, gradients(plain), strict=True):
            assert_close(actual, expected)

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("rows", [1, 3])
    def test_in_place(self, rows, dtype):
        draw = Draw()
        layer, store = weights(draw, PLAIN, dtype), np.zeros(windows(draw, PLAIN, 20_000).shape, dtype)

        def run_prefill(store, x, layer, places):
            return causal_conv1d_prefill(x, *layer, store, places, implementation=self.implementation)

        x, places = draw.normal(8 * rows, PLAIN.channels, dtype=dtype), packed([8] * rows, [1] * rows, 4, first_slot=3)
        assert_in_place(run_prefill, store, x, layer, places)

        def run_update(store, x, layer, places):
            return causal_conv1d_update(x, *layer, store, places, implementation=self.implementation)

        places = Rows(ints([1] * rows), draw.slots(99, rows, 2))
        assert_in_place(run_update, store, draw.normal(rows, 2, PLAIN.channels, dtype=dtype), layer, places)


class TestXla(Convolution):
    implementation = "xla"


@pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"no native operations: {native.WHY_MISSING}")
class TestNative(Convolution):
    """By the name under which schedule-invariant programs choose it."""

    implementation = "invariant"
    test_sequence_gradients = None


class TestElsewhere:
    """Updates in the form for other platforms."""

    implementation, check = ELSEWHERE, Convolution.check
    test_update_equals_definition = Convolution.test_update_equals_definition


def test_refuses_other_activations():
    with pytest.raises(ValueError, match="activation is 'gelu', expected 'silu' or None"):
        causal_conv1d_sequence(*on_device((np.ones((1, 5, 8)), np.ones((8, 4)))), None, activation="gelu")
