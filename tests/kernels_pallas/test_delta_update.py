"""The delta update against its definition, and what holds for any implementation of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted
from test_delta_scan import layer, states
from test_state_update import where

from benchmarks.kernels.workloads import DELTA
from kernels_pallas.delta_scan import delta_scan_sequence
from kernels_pallas.delta_update import delta_update, reference
from kernels_pallas.dispatch import UnsupportedError

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in DELTA]
ODD, BY_CHANNEL = (s for s in SHAPES if s.name.startswith("6 heads, 3 groups"))
DTYPES = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


class Update:
    """Every implementation of `delta_update`."""

    implementation: str
    odd = ODD
    """Sizes for the tests of everything else than sizes."""

    @pytest.fixture
    def update(self):
        return jitted(delta_update, implementation=self.implementation)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, update, shape):
        self.check(update, shape, np.float32)

    @pytest.mark.parametrize("shape", [ODD, BY_CHANNEL, SHAPES[3]], ids=lambda s: s.name)
    def test_bfloat16(self, update, shape):
        self.check(update, shape, jnp.bfloat16)

    def check(self, update, shape, dtype):
        draw = Draw()
        slots = shape.rows * (shape.steps + 1) + 3
        inputs = layer(draw, shape, shape.rows, shape.steps, dtype=dtype)
        store = states(draw, shape, slots, dtype)
        places = draw.slots(slots, shape.rows, shape.steps + 1)
        read, write = places[:, 0], places[:, 1:]
        if shape.rows > 1:
            read[1], write[-1] = 0, 0  # a fresh row and one that keeps nothing
        y, after = update(*inputs, store, **where(read, write))
        want_y, want = reference.delta_update(*inputs, store, **where(read, write))
        assert y.dtype == after.dtype == dtype
        assert_close(y, want_y, dtype)
        assert_close(after[1:], want[1:], dtype)
        untouched = np.setdiff1d(np.arange(slots), write)
        assert_same_bits(after[untouched], store[untouched])

    @pytest.mark.parametrize("step", [0, 1, 2])
    def test_a_row_may_write_the_slot_it_reads(self, update, step):
        write = np.array([[4, 5, 6], [0, 0, 0], [7, 0, 0]])
        write[0, step], write[1, step] = 1, 2
        self.check_places(update, 3, 8, where([1, 2, 0], write))

    def test_several_rows_may_read_one_slot(self, update):
        self.check_places(update, 1, 6, where([2, 2, 2], [[3], [1], [4]]))

    def check_places(self, update, steps, slots, places):
        draw = Draw()
        inputs, store = layer(draw, self.odd, len(places["read_slot"]), steps), states(draw, self.odd, slots)
        y, after = update(*inputs, store, **places)
        want_y, want = reference.delta_update(*inputs, store, **places)
        assert_close(y, want_y)
        assert_close(after[1:], want[1:])

    @staticmethod
    def assert_unchanged(actual, expected):
        assert_same_bits(actual, expected)

    @DTYPES
    def test_padding_leaves_the_state_bitwise(self, update, dtype):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 2, 3, dtype=dtype), states(draw, self.odd, 7, dtype)
        *others, beta = inputs
        beta[0] = 0  # a row of padding
        beta[1, 1:] = 0  # one real step
        for v in others:
            v[0], v[1, 1:] = np.nan, np.nan
        y, after = update(*inputs, store, **where([1, 2], [[0, 0, 3], [4, 5, 6]]))
        assert_same_bits(after[3], store[1])
        self.assert_unchanged(after[5], after[4])
        self.assert_unchanged(after[6], after[4])
        assert (y[0] == 0).all()
        assert (y[1, 1:] == 0).all()

    @DTYPES
    def test_steps_in_one_call_equal_steps_in_several(self, update, dtype):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 2, 3, dtype=dtype), states(draw, self.odd, 7, dtype)
        write = np.array([[1, 2, 3], [4, 5, 6]])
        y, after = update(*inputs, store, **where([0, 5], write))
        read, split = np.array([0, 5]), store
        for t in range(3):
            one = (v[:, t : t + 1] for v in inputs)
            part, split = update(*one, split, **where(read, write[:, t : t + 1]))
            assert_close(part[:, 0], y[:, t], tolerance=1e-6 if dtype == np.float32 else 1e-3)
            read = write[:, t]
        # Float32 sums may differ in their last bit, and then, rarely, round to the other neighbour in bfloat16. States
        # that are not rounded between the steps would differ nearly everywhere.
        differs = ~np.isclose(
            np.asarray(split[1:], np.float32), np.asarray(after[1:], np.float32), rtol=1e-5, atol=1e-6
        )
        assert differs.mean() <= (0 if dtype == np.float32 else 1e-3)

    def test_equals_the_scan(self, update):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 2, 6), states(draw, self.odd, 3)
        y, after = update(*inputs, store, **where([0, 0], [[0] * 5 + [1], [0] * 5 + [2]]))
        y_scan, state = jitted(delta_scan_sequence)(*inputs)
        assert_close(y, y_scan)
        assert_close(after[1:], state)

    @pytest.mark.smoke
    @pytest.mark.parametrize(("rows", "dtype"), [(1, np.float32), (3, np.float32), (3, jnp.bfloat16)])
    @pytest.mark.parametrize("shape", [SHAPES[0], ODD, BY_CHANNEL, SHAPES[-1]], ids=lambda s: s.name)
    def test_in_place(self, shape, rows, dtype):
        draw = Draw()
        inputs = layer(draw, shape, rows, 2, dtype=dtype)

        def run(store, inputs, places):
            return delta_update(*inputs, store, **places, implementation=self.implementation)

        one = states(draw, shape, 1, dtype)
        store = np.zeros((4_000_000 // one.size, *one.shape[1:]), one.dtype)
        places = draw.slots(len(store), rows, 3)
        assert_in_place(run, store, inputs, where(places[:, 0], places[:, 1:]))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", DELTA, ids=lambda s: s.name)
    def test_real_sizes(self, update, shape):
        draw = Draw()
        rows = min(shape.rows, 3)
        inputs, store = layer(draw, shape, rows, shape.steps), states(draw, shape, 16)
        places = draw.slots(16, rows, shape.steps + 1)
        places = where(places[:, 0], places[:, 1:])
        y, after = update(*inputs, store, **places)
        want_y, want = reference.delta_update(*inputs, store, **places)
        assert_close(y, want_y)
        assert_close(after[1:], want[1:])


class TestXla(Update):
    implementation = "xla"


class TestXlaByChannel(TestXla):
    """Every channel of a key decays on its own."""

    odd = BY_CHANNEL
    test_equals_definition = test_bfloat16 = test_in_place = test_real_sizes = None  # above, with all sizes


class TestXlaAllRows(Update):
    """The form for other platforms."""

    implementation = "xla_all_rows"


class Kernel(Update):
    """Interpreted."""

    test_in_place = None  # the interpreter copies; compiled programs are looked at instead
    test_real_sizes = None  # the interpreter takes minutes

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, update, shape):
        self.check(update, shape, np.float32)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", [ODD, BY_CHANNEL], ids=lambda s: s.name)
    def test_sizes(self, update, shape):
        self.check(update, shape, np.float32)

    @pytest.mark.parametrize("shape", [ODD])
    def test_bfloat16(self, update, shape):
        self.check(update, shape, jnp.bfloat16)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"

    @staticmethod
    def assert_unchanged(actual, expected):
        # XLA:CPU may compute a state twice, for its slot and for the next step, and contract a product and a sum once.
        assert_close(actual, expected, tolerance=0 if expected.dtype != np.float32 else 3e-7)

    def test_says_what_it_cannot_run(self, update):
        draw, shape = Draw(), dataclasses.replace(ODD, state=36)
        with pytest.raises(UnsupportedError, match="keys have a size of 36, not a multiple of 8"):
            update(*layer(draw, shape, 1, 1), states(draw, shape, 3), **where([1], [[2]]))
