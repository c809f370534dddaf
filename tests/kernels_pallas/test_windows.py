"""Windows read and written by slots: the same whatever moves them, and what is not named stays as it was."""

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_in_place, assert_same_bits, jitted, on_device

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.windows import pallas_tpu, read_windows, write_windows

pytestmark = pytest.mark.full

DTYPES = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def ints(values):
    return np.array(values, np.int32)


def windows(count, rows=3, channels=128, dtype=np.float32):
    store = Draw().normal(count, rows, channels, dtype=dtype)
    store[0] = np.nan
    return store


class Windows:
    """Every implementation."""

    implementation: str

    @pytest.fixture
    def read(self):
        return jitted(read_windows, implementation=self.implementation)

    @pytest.fixture
    def write(self):
        return jitted(write_windows, implementation=self.implementation)

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
    def test_read(self, read, rows, dtype):
        store = windows(9, rows, dtype=dtype)
        found = read(store, ints([3, 0, 8, 3, 1, 0]))  # one slot by two rows, the null slot by two
        expected = store[[3, 0, 8, 3, 1, 0]]
        expected[[1, 5]] = 0
        assert found.dtype == dtype
        assert_same_bits(found, expected)

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("rows", [1, 3, 8])
    def test_write(self, write, rows, dtype):
        store, values = windows(9, rows, dtype=dtype), Draw(1).normal(6, rows, 128)
        for places in (ints([5, 0, 8, 2, 0, 1]), ints([0] * 6)):
            after, expected = write(store, values, places), store.copy()
            expected[places[places > 0]] = values[places > 0].astype(dtype)
            assert_same_bits(after[1:], expected[1:])

    def test_what_was_read_before_it_was_written(self):
        store = windows(5)

        def turn(store, read, write):
            found = read_windows(store, read, implementation=self.implementation)
            return write_windows(store, found * 2, write, implementation=self.implementation)

        after = jitted(turn)(store, ints([1, 2, 3]), ints([1, 4, 3]))
        expected = store.copy()
        expected[[1, 4, 3]] = 2 * store[[1, 2, 3]]
        assert_same_bits(after[1:], expected[1:])


class TestXla(Windows):
    implementation = "xla"

    @DTYPES
    def test_in_place(self, dtype):
        def run(store, values, index):
            return None, write_windows(store, values, index, implementation="xla")

        assert_in_place(run, np.zeros((20_000, 3, 128), dtype), np.ones((2, 3, 128), dtype), ints([7, 3]))


class TestTpu(Windows):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize(("most", "blocks"), [(1, 6), (2, 3), (4, 2), (99, 1)])
    def test_blocks_of_rows(self, monkeypatch, most, blocks):
        """As many rows at a time as there is room for, and as divide them all."""
        store = windows(9)
        monkeypatch.setattr(pallas_tpu, "BLOCK_BYTES", most * 4 * 128 * 4)  # three rows are padded to four
        index = ints([3, 0, 8, 3, 1, 5])
        assert len(index) // pallas_tpu._rows_at_once(*on_device((store, index))) == blocks
        found = np.asarray(read_windows(*on_device((store, index)), implementation=self.implementation))
        assert_same_bits(found[[0, 2, 3, 4, 5]], store[[3, 8, 3, 1, 5]])
        values, there = Draw(1).normal(6, 3, 128), ints([3, 0, 8, 2, 1, 5])
        after = np.asarray(write_windows(*on_device((store, values, there)), implementation=self.implementation))
        assert_same_bits(after[[3, 8, 2, 1, 5]], values[[0, 2, 3, 4, 5]])
        assert_same_bits(after[[4, 6, 7]], store[[4, 6, 7]])

    def test_says_what_it_cannot_run(self, read):
        with pytest.raises(UnsupportedError, match="100 channels, not a multiple of 128"):
            read(windows(3, channels=100), ints([1]))
