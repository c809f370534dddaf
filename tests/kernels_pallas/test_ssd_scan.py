"""The scan against its definition, and what holds for any implementation of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted, on_device

from benchmarks.kernels.workloads import MAMBA2
from kernels_pallas import native
from kernels_pallas.ssd_scan import reference, ssd_scan, ssd_scan_sequence

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in MAMBA2]
ODD = next(s for s in SHAPES if s.name == "9 heads, 3 groups")


def layer(draw, shape, *lead, dtype=np.float32):
    """x, dt, a, b, c, d for tokens [*lead]."""
    inner = (shape.groups, shape.state)
    return (
        draw.normal(*lead, shape.heads, shape.head_dim, dtype=dtype),
        draw.positive(*lead, shape.heads, scale=0.3),
        -draw.positive(shape.heads),
        draw.normal(*lead, *inner, dtype=dtype),
        draw.normal(*lead, *inner, dtype=dtype),
        draw.normal(shape.heads),
    )


def states(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.heads, shape.head_dim, shape.state, dtype=dtype)
    store[0] = np.nan
    return store


def where(first, read, write):
    return {
        "tile_first": np.array(first, bool),
        "read_slot": np.array(read, np.int32),
        "write_slot": np.array(write, np.int32),
    }


def pad(inputs, tile, start):
    """NaN from token `start` of a tile on, with dt = 0."""
    x, dt, _, b, c, _ = inputs
    dt[tile, start:] = 0
    for v in (x, b, c):
        v[tile, start:] = np.nan


needs_native = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"no C++ operations: {native.WHY_MISSING}")


class Scan:
    """Every implementation of `ssd_scan`."""

    implementation: str
    odd = ODD
    """Sizes for the tests of everything else than sizes."""

    @pytest.fixture
    def scan(self):
        return jitted(ssd_scan, implementation=self.implementation)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, scan, shape):
        # A continued row of three tiles (the last one short), a fresh row of one, a padding tile, a continued row.
        draw = Draw()
        inputs = layer(draw, shape, 6, shape.tile_size)
        pad(inputs, 2, shape.tile_size // 2 + 1)
        pad(inputs, 4, 0)
        store = states(draw, shape, 9)
        places = where([1, 0, 0, 1, 1, 1], [3, 0, 0, 0, 0, 5], [0, 7, 1, 2, 0, 8])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(after[1:], want[1:])
        assert_same_bits(after[[0, 3, 4, 5, 6]], store[[0, 3, 4, 5, 6]])

    def test_bfloat16(self, scan):
        draw = Draw()
        inputs, store = (
            layer(draw, self.odd, 3, self.odd.tile_size, dtype=jnp.bfloat16),
            states(draw, self.odd, 6, jnp.bfloat16),
        )
        places = where([1, 0, 1], [2, 0, 0], [3, 4, 5])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert y.dtype == after.dtype == jnp.bfloat16
        assert_close(y, want_y, jnp.bfloat16)
        assert_close(after[3:], want[3:], jnp.bfloat16)
        assert_same_bits(after[:3], store[:3])

    def test_padding_leaves_the_state_bitwise(self, scan):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 2, self.odd.tile_size), states(draw, self.odd, 5)
        pad(inputs, 0, 0)
        pad(inputs, 1, 0)
        y, after = scan(*inputs, store, **where([1, 0], [2, 0], [3, 4]))
        assert_same_bits(after[3], store[2])
        assert_same_bits(after[4], store[2])
        assert (y == 0).all()

    @pytest.mark.parametrize("tokens", [1, 5, 31])
    def test_what_padding_holds_does_not_matter(self, scan, tokens):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 1, self.odd.tile_size), states(draw, self.odd, 4)
        places = where([1], [2], [3])
        inputs[1][0, tokens:] = 0
        y, after = scan(*inputs, store, **places)
        pad(inputs, 0, tokens)
        y_nan, after_nan = scan(*inputs, store, **places)
        assert_same_bits(after_nan[3], after[3])
        assert_same_bits(y_nan[:, :tokens], y[:, :tokens])

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    def test_cutting_between_tiles_changes_no_bit(self, dtype):
        scan = jitted(ssd_scan, implementation=self.implementation, emitters_of_users=True)
        draw = Draw()
        inputs, store = layer(draw, self.odd, 4, self.odd.tile_size), states(draw, self.odd, 4, dtype)
        y, after = scan(*inputs, store, **where([1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3]))
        split, parts, read = store, [], 2
        for tile in range(4):
            x, dt, a, b, c, d = inputs
            one = (x[[tile]], dt[[tile]], a, b[[tile]], c[[tile]], d)
            part, split = scan(*one, split, **where([1], [read], [3]))
            parts.append(part)
            read = 3
        assert_same_bits(np.concatenate(parts), y)
        assert_same_bits(split[3], after[3])

    def test_a_row_may_write_the_slot_it_reads(self, scan):
        # After its first tile, and after its last.
        draw = Draw()
        inputs, store = layer(draw, self.odd, 4, self.odd.tile_size), states(draw, self.odd, 5)
        places = where([1, 0, 1, 0], [1, 0, 2, 0], [1, 3, 4, 2])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(after[1:], want[1:])

    def test_several_rows_may_read_one_slot(self, scan):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 3, self.odd.tile_size), states(draw, self.odd, 5)
        places = where([1, 1, 1], [2, 2, 2], [3, 1, 4])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(after[1:], want[1:])

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [ODD, SHAPES[-1]], ids=lambda s: s.name)
    def test_in_place(self, shape, dtype):
        draw = Draw()
        inputs = layer(draw, shape, 2, shape.tile_size, dtype=dtype)

        def run(store, inputs, places):
            return ssd_scan(*inputs, store, **places, implementation=self.implementation)

        store = np.zeros(
            (20_000_000 // (shape.heads * shape.head_dim * shape.state), *states(draw, shape, 1).shape[1:])
        )
        assert_in_place(run, store.astype(dtype), inputs, where([1, 1], [1, 2], [3, 4]))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", MAMBA2, ids=lambda s: s.name)
    def test_real_sizes(self, scan, shape):
        draw = Draw()
        inputs, store = layer(draw, shape, 3, shape.tile_size), states(draw, shape, 4)
        places = where([1, 0, 1], [2, 0, 0], [0, 1, 3])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(after[1:], want[1:])


class TestXla(Scan):
    implementation = "xla"


@needs_native
class TestNative(Scan):
    """Token by token; states must be float32."""

    implementation = "native"
    test_bfloat16 = None

    @pytest.mark.parametrize("dtype", [np.float32])
    def test_cutting_between_tiles_changes_no_bit(self, dtype):
        super().test_cutting_between_tiles_changes_no_bit(dtype)

    @pytest.mark.parametrize("dtype", [np.float32])
    @pytest.mark.parametrize("shape", [ODD, SHAPES[-1]], ids=lambda s: s.name)
    def test_in_place(self, shape, dtype):
        super().test_in_place(shape, dtype)


class TestXlaWholeTiles(Scan):
    """The form for other platforms."""

    implementation = "xla_whole_tiles"
    test_in_place = None  # XLA:CPU copies for it; the compilers that it is for are asked


def recurrence(x, dt, a, b, c, d, initial_state):
    """The sequential definition in JAX, for gradients."""
    repeats = x.shape[2] // b.shape[2]
    b, c = (jnp.repeat(v, repeats, axis=2) for v in (b, c))

    def token(state, inputs):
        x, dt, b, c = inputs
        fed = (dt[..., None] * x)[..., None] * b[..., None, :]
        state = state * jnp.exp(dt * a)[..., None, None] + fed
        return state, (state * c[..., None, :]).sum(-1) + d[:, None] * x

    state, y = lax.scan(token, initial_state, tuple(v.swapaxes(0, 1) for v in (x, dt, b, c)))
    return y.swapaxes(0, 1), state


class Sequence:
    """Every implementation of `ssd_scan_sequence`."""

    implementation: str

    @pytest.mark.smoke
    @pytest.mark.parametrize("length", [1, 3, 31, 32, 33, 101])
    def test_equals_definition(self, length):
        inputs = layer(Draw(length), ODD, 2, length)
        y, state = jitted(ssd_scan_sequence, chunk_size=32, implementation=self.implementation)(*inputs)
        want_y, want = reference.ssd_scan_sequence(*inputs)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(state, want)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_continues_from_a_state(self, shape):
        draw = Draw()
        inputs, initial = layer(draw, shape, 1, 37), states(draw, shape, 2)[1:]
        run = jitted(ssd_scan_sequence, implementation=self.implementation)
        want_y, want = reference.ssd_scan_sequence(*inputs, initial_state=initial)
        y, state = run(*inputs, initial_state=initial)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(state, want)

    def test_equals_the_scan_of_tiles(self):
        inputs = layer(Draw(), ODD, 1, 3 * ODD.tile_size)
        x, dt, a, b, c, d = inputs
        cut = [v.reshape(3, ODD.tile_size, *v.shape[2:]) for v in (x, dt, b, c)]
        store, places = states(Draw(), ODD, 3), where([1, 0, 0], [0, 0, 0], [0, 0, 2])
        y, after = jitted(ssd_scan)(cut[0], cut[1], a, cut[2], cut[3], d, store, **places)
        y_sequence, state = jitted(ssd_scan_sequence, implementation=self.implementation)(*inputs)
        assert_close(y.reshape(y_sequence.shape), y_sequence)
        assert_close(after[2], state[0])

    @pytest.mark.parametrize("scale", [1.0, 300.0], ids=["ordinary decay", "decay that would overflow unmasked"])
    def test_gradients_equal_those_of_the_recurrence(self, scale):
        draw = Draw()
        x, dt, a, b, c, d = on_device(layer(draw, ODD, 2, 41))
        inputs = (x, dt, scale * a, b, c, d, jnp.asarray(states(draw, ODD, 3)[1:]))

        def ours(*v):
            return ssd_scan_sequence(*v[:6], initial_state=v[6], chunk_size=16, implementation=self.implementation)

        def loss(function):
            def total(*v):
                y, state = function(*v)
                return jnp.sin(y).sum() + jnp.cos(state).sum()

            return jax.jit(jax.grad(total, argnums=range(7)))

        for actual, expected in zip(loss(ours)(*inputs), loss(recurrence)(*inputs), strict=True):
            assert np.isfinite(actual).all()
            assert_close(actual, expected, tolerance=2e-4)

    def test_padding(self):
        # A batch of two lengths: the shorter one's end state and outputs are as if alone, and NaN there goes nowhere.
        x, dt, a, b, c, d = layer(Draw(), ODD, 2, 50)
        run = jitted(ssd_scan_sequence, implementation=self.implementation)
        y_alone, alone = run(x[:1, :21], dt[:1, :21], a, b[:1, :21], c[:1, :21], d)
        dt[0, 21:] = 0
        for v in (x, b, c):
            v[0, 21:] = np.nan
        y, state = run(x, dt, a, b, c, d)
        assert_close(y[:1, :21], y_alone)
        assert_close(state[:1], alone)
        assert (y[0, 21:] == 0).all()


class TestXlaSequence(Sequence):
    implementation = "xla"


def test_refuses_shapes_that_do_not_fit():
    x, dt, a, b, c, d = on_device(layer(Draw(), ODD, 2, 8))
    with pytest.raises(ValueError, match="9 heads do not divide into 2 groups"):
        ssd_scan_sequence(x, dt, a, b[:, :, :2], c[:, :, :2], d)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ssd_scan_sequence(x, dt, a, b, c, d, chunk_size=0)
