"""The scan by the gated delta rule against its definition, and what holds for any implementation of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted, on_device

from benchmarks.kernels.workloads import DELTA
from kernels_pallas import native
from kernels_pallas.delta_scan import delta_scan, delta_scan_sequence, reference
from kernels_pallas.delta_scan.inverse import unit_lower_inverse

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in DELTA]
ODD, BY_CHANNEL = (s for s in SHAPES if s.name.startswith("6 heads, 3 groups"))
TOLERANCE = 5e-5


def unit(vectors):
    """Vectors of length 1, as the model's queries and keys."""
    length = np.sqrt((vectors.astype(np.float32) ** 2).sum(-1, keepdims=True))
    return (vectors / length).astype(vectors.dtype)


def layer(draw, shape, *lead, dtype=np.float32):
    """q, k, v, log_decay, beta for tokens [*lead]."""
    inner = (shape.groups, shape.state)
    gates = (shape.heads, shape.state) if shape.by_channel else (shape.heads,)
    return (
        unit(draw.normal(*lead, *inner, dtype=dtype)),
        unit(draw.normal(*lead, *inner, dtype=dtype)),
        draw.normal(*lead, shape.heads, shape.head_dim, dtype=dtype),
        -draw.positive(*lead, *gates, scale=0.3),
        draw.random.uniform(0.05, 1.9, (*lead, shape.heads)).astype(np.float32),
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
    """NaN from token `start` of a tile on, with beta = 0."""
    *others, beta = inputs
    beta[tile, start:] = 0
    for v in others:
        v[tile, start:] = np.nan


needs_native = pytest.mark.skipif(not native.has_wide_registers(), reason=f"no C++ scan for {native.instructions()}")


class Scan:
    """Every implementation of `delta_scan`."""

    implementation: str
    odd = ODD
    """Sizes for the tests of everything else than sizes."""
    strongest = 2e-3
    """Tolerance where decays are very unlike. Decays of heads are differences of sums from a block's start."""

    @pytest.fixture
    def scan(self):
        return jitted(delta_scan, implementation=self.implementation)

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
        want_y, want = reference.delta_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(after[1:], want[1:], tolerance=TOLERANCE)
        assert_same_bits(after[[0, 3, 4, 5, 6]], store[[0, 3, 4, 5, 6]])

    def test_equal_keys(self, scan):
        # What a row says again and again: a power series of the system would have terms beyond any precision.
        shape, draw = self.odd, Draw()
        q, k, v, log_decay, beta = layer(draw, shape, 2, shape.tile_size)
        k[:], log_decay[:], beta[:] = k[0, 0], -1e-3, 1.0
        places, store = where([1, 0], [1, 0], [0, 2]), states(draw, shape, 3)
        y, after = scan(q, k, v, log_decay, beta, store, **places)
        want_y, want = reference.delta_scan(q, k, v, log_decay, beta, store, **places)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(after[2], want[2], tolerance=TOLERANCE)

    def test_decays_of_any_strength(self, scan):
        # One token forgets all, the next nothing: a difference of sums would have lost the digits of the small decays,
        # and the inverse of a strong one overflows.
        shape, draw = self.odd, Draw()
        q, k, v, log_decay, beta = layer(draw, shape, 2, shape.tile_size)
        strength = draw.random.choice([1e-4, 1e-2, 1.0, 30.0, 3000.0], log_decay.shape, p=[0.4, 0.3, 0.2, 0.05, 0.05])
        inputs = q, k, v, (log_decay * strength).astype(np.float32), beta
        places, store = where([1, 0], [1, 0], [0, 2]), states(draw, shape, 3)
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.delta_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=self.strongest)
        assert_close(after[2], want[2], tolerance=self.strongest)

    def test_bfloat16(self, scan):
        draw = Draw()
        inputs = layer(draw, self.odd, 3, self.odd.tile_size, dtype=jnp.bfloat16)
        store = states(draw, self.odd, 6, jnp.bfloat16)
        places = where([1, 0, 1], [2, 0, 0], [3, 4, 5])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.delta_scan(*inputs, store, **places)
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

    @pytest.mark.parametrize("tokens", [1, 5, 15])
    def test_what_padding_holds_does_not_matter(self, scan, tokens):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 1, self.odd.tile_size), states(draw, self.odd, 4)
        places = where([1], [2], [3])
        inputs[4][0, tokens:] = 0
        y, after = scan(*inputs, store, **places)
        pad(inputs, 0, tokens)
        y_nan, after_nan = scan(*inputs, store, **places)
        assert_same_bits(after_nan[3], after[3])
        assert_same_bits(y_nan[:, :tokens], y[:, :tokens])

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    def test_cutting_between_tiles_changes_no_bit(self, dtype):
        scan = jitted(delta_scan, implementation=self.implementation, emitters_of_users=True)
        draw = Draw()
        inputs, store = layer(draw, self.odd, 4, self.odd.tile_size), states(draw, self.odd, 4, dtype)
        y, after = scan(*inputs, store, **where([1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3]))
        split, parts, read = store, [], 2
        for tile in range(4):
            part, split = scan(*(v[[tile]] for v in inputs), split, **where([1], [read], [3]))
            parts.append(part)
            read = 3
        assert_same_bits(np.concatenate(parts), y)
        assert_same_bits(split[3], after[3])

    def test_a_row_may_write_the_slot_it_reads(self, scan):
        # After its first tile, or its last.
        draw, places = Draw(), where([1, 0, 1, 0], [1, 0, 2, 0], [1, 3, 4, 2])
        inputs, store = layer(draw, self.odd, 4, self.odd.tile_size), states(draw, self.odd, 5)
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.delta_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(after[1:], want[1:], tolerance=TOLERANCE)

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [ODD, BY_CHANNEL, SHAPES[-1]], ids=lambda s: s.name)
    def test_in_place(self, shape, dtype):
        draw = Draw()
        inputs = layer(draw, shape, 2, shape.tile_size, dtype=dtype)

        def run(store, inputs, places):
            return delta_scan(*inputs, store, **places, implementation=self.implementation)

        one = states(draw, shape, 1)
        store = np.zeros((20_000_000 // one.size, *one.shape[1:]))
        assert_in_place(run, store.astype(dtype), inputs, where([1, 1], [1, 2], [3, 4]))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", DELTA, ids=lambda s: s.name)
    def test_real_sizes(self, scan, shape):
        draw = Draw()
        inputs, store = layer(draw, shape, 3, shape.tile_size), states(draw, shape, 4)
        places = where([1, 0, 1], [2, 0, 0], [0, 1, 3])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.delta_scan(*inputs, store, **places)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(after[1:], want[1:], tolerance=TOLERANCE)


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


class TestXlaByChannel(TestXla):
    """Every channel of a key decays on its own."""

    odd, strongest = BY_CHANNEL, TOLERANCE
    test_equals_definition = test_in_place = test_real_sizes = None  # above, with all sizes


def recurrence(q, k, v, log_decay, beta, initial_state):
    """The sequential definition in JAX, for gradients."""
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(one, repeats, axis=2) for one in (q, k))

    def token(state, inputs):
        q, k, v, log_decay, beta = inputs
        state = state * jnp.exp(log_decay).reshape(*v.shape[:2], 1, -1)
        error = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
        state = state + error[..., None] * k[..., None, :]
        return state, (state * q[..., None, :]).sum(-1)

    state, y = lax.scan(token, initial_state, tuple(one.swapaxes(0, 1) for one in (q, k, v, log_decay, beta)))
    return y.swapaxes(0, 1), state


class Sequence:
    """Every implementation of `delta_scan_sequence`."""

    implementation: str
    odd = ODD

    @pytest.mark.smoke
    @pytest.mark.parametrize("length", [1, 3, 31, 32, 33, 101])
    def test_equals_definition(self, length):
        inputs = layer(Draw(length), self.odd, 2, length)
        y, state = jitted(delta_scan_sequence, chunk_size=32, implementation=self.implementation)(*inputs)
        want_y, want = reference.delta_scan_sequence(*inputs)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(state, want, tolerance=TOLERANCE)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_continues_from_a_state(self, shape):
        draw = Draw()
        inputs, initial = layer(draw, shape, 1, 37), states(draw, shape, 2)[1:]
        run = jitted(delta_scan_sequence, implementation=self.implementation)
        want_y, want = reference.delta_scan_sequence(*inputs, initial_state=initial)
        y, state = run(*inputs, initial_state=initial)
        assert_close(y, want_y, tolerance=TOLERANCE)
        assert_close(state, want, tolerance=TOLERANCE)

    def test_equals_the_scan_of_tiles(self):
        inputs = layer(Draw(), self.odd, 1, 3 * self.odd.tile_size)
        cut = [v.reshape(3, self.odd.tile_size, *v.shape[2:]) for v in inputs]
        store, places = states(Draw(), self.odd, 3), where([1, 0, 0], [0, 0, 0], [0, 0, 2])
        y, after = jitted(delta_scan)(*cut, store, **places)
        y_sequence, state = jitted(delta_scan_sequence, implementation=self.implementation)(*inputs)
        assert_close(y.reshape(y_sequence.shape), y_sequence)
        assert_close(after[2], state[0])

    @pytest.mark.parametrize("scale", [1.0, 300.0], ids=["ordinary decay", "decay that would overflow unmasked"])
    def test_gradients_equal_those_of_the_recurrence(self, scale):
        draw = Draw()
        q, k, v, log_decay, beta = on_device(layer(draw, self.odd, 2, 41))
        inputs = (q, k, v, scale * log_decay, beta, jnp.asarray(states(draw, self.odd, 3)[1:]))

        def ours(*v):
            return delta_scan_sequence(*v[:5], initial_state=v[5], chunk_size=16, implementation=self.implementation)

        def loss(function):
            def total(*v):
                y, state = function(*v)
                return jnp.sin(y).sum() + jnp.cos(state).sum()

            return jax.jit(jax.grad(total, argnums=range(6)))

        for actual, expected in zip(loss(ours)(*inputs), loss(recurrence)(*inputs), strict=True):
            assert np.isfinite(actual).all()
            assert_close(actual, expected, tolerance=2e-4)

    def test_padding(self):
        # A batch of two lengths: the shorter one's end state and outputs are as if alone, and NaN there goes nowhere.
        inputs = layer(Draw(), self.odd, 2, 50)
        run = jitted(delta_scan_sequence, implementation=self.implementation)
        y_alone, alone = run(*(v[:1, :21] for v in inputs))
        pad(inputs, 0, 21)
        y, state = run(*inputs)
        assert_close(y[:1, :21], y_alone)
        assert_close(state[:1], alone)
        assert (y[0, 21:] == 0).all()


class TestXlaSequence(Sequence):
    implementation = "xla"


class TestXlaSequenceByChannel(TestXlaSequence):
    odd = BY_CHANNEL
    test_continues_from_a_state = None  # above, with all sizes


@pytest.mark.parametrize("size", [1, 2, 5, 16, 36, 64])
def test_inverse_of_a_unit_lower_triangle(size):
    below = np.tril(Draw(size).normal(3, size, size, scale=0.3), -1)
    inverse = unit_lower_inverse(jnp.asarray(below), lambda a, b: jnp.matmul(a, b, precision="highest"))
    assert_close(inverse, np.linalg.inv(np.eye(size) + below.astype(np.float64)))


def test_refuses_shapes_that_do_not_fit():
    q, k, v, log_decay, beta = on_device(layer(Draw(), ODD, 2, 8))
    four = jnp.zeros((2, 8, 4, ODD.state))
    with pytest.raises(ValueError, match="6 heads do not divide into 4 groups"):
        delta_scan_sequence(four, four, v, log_decay, beta)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        delta_scan_sequence(q, k, v, log_decay, beta, chunk_size=0)
