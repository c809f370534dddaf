"""Reading and writing slots: in C++ where it is built, and in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from operation_checks import assert_in_place, assert_same_bits

from kernels_pallas import native, slots

pytestmark = pytest.mark.full

INDEX = np.array([3, 0, 1, 3, 0, 4], np.int32)
TARGET = np.array([2, 0, 5, 1, 0, 3], np.int32)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.bool])


def numbers(count, dtype, *shape):
    """With anything in slot 0."""
    found = np.random.default_rng(count).normal(size=(count, *shape))
    found[0] = np.nan if jnp.issubdtype(dtype, jnp.floating) else 7
    return found.astype(dtype)


@pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")
class TestNative:
    @pytest.fixture(autouse=True)
    def form(self):
        pass

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("shape", [(), (5,), (3, 20_000)])
    def test_reads(self, dtype, shape):
        store = numbers(6, dtype, *shape)
        found = np.asarray(jax.jit(slots.read_slots)(store, INDEX))
        expected = np.where((INDEX > 0).reshape(-1, *[1] * len(shape)), store[INDEX], np.zeros((), store.dtype))
        assert_same_bits(found, expected.astype(store.dtype))

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("shape", [(), (5,), (3, 20_000)])
    def test_writes(self, dtype, shape):
        store, values = numbers(7, dtype, *shape), numbers(6, np.float32, *shape)
        found = np.asarray(jax.jit(slots.write_slots)(store, values, TARGET))
        expected = store.copy()
        expected[TARGET[TARGET > 0]] = jnp.asarray(values).astype(dtype)[TARGET > 0]
        assert_same_bits(found[1:], expected[1:])

    @pytest.mark.smoke
    def test_in_place(self):
        def move(store, source, target):
            return slots.write_slots(store, slots.read_slots(store, source), target)

        assert_in_place(move, numbers(100, np.float32, 5_000), INDEX, TARGET)

    def test_what_is_read_is_what_was_there(self):
        """A read that nothing ties to the write comes before it all the same."""

        def swap(store, values, index):
            return slots.write_slots(store, values, index), slots.read_slots(store, index)

        store, values, index = numbers(6, np.float32, 8), numbers(2, np.float32, 8), np.array([4, 2], np.int32)
        new, old = jax.jit(swap, donate_argnums=0)(jnp.asarray(store), values, index)
        assert_same_bits(old, store[index])
        assert_same_bits(np.asarray(new)[index], values)


class TestXla(TestNative):
    """An installation without a C++ compiler."""

    @pytest.fixture(autouse=True)
    def form(self, monkeypatch):
        monkeypatch.setattr(native, "WHY_MISSING", "not built")
        jax.clear_caches()
        yield
        jax.clear_caches()


def test_a_store_that_the_compiler_divides_is_not_collected():
    place = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("piece",)), PartitionSpec(None, "piece"))
    store = jax.device_put(np.arange(20 * 4 * 3, dtype=np.float32).reshape(20, 4, 3), place)

    def copy(store, source, target):
        return slots.write_slots(store, slots.read_slots(store, source, divided=True), target, divided=True)

    places = np.array([3, 0, 5], np.int32), np.array([7, 0, 9], np.int32)
    program = jax.jit(copy, donate_argnums=0, out_shardings=place).lower(store, *places).compile()
    assert "all-gather" not in program.as_text()
    before = np.asarray(store)
    after = np.asarray(program(store, *places))
    assert (after[[7, 9]] == before[[3, 5]]).all()
    assert (np.delete(after, [7, 9], axis=0) == np.delete(before, [7, 9], axis=0)).all()
