"""Slots and windows, read and written: the same whatever moves them, and what is not named stays as it was.

Windows in plain JAX are slots.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from operation_checks import assert_in_place, assert_same_bits, ints, on_device

from kernels_pallas import native, slots
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.windows import pallas_tpu, read_windows, write_windows

pytestmark = pytest.mark.full


SLOTS = slots.read_slots, slots.write_slots
TPU = tuple(partial(move, implementation="pallas_tpu_interpreted") for move in (read_windows, write_windows))
FORMS = {"slots in C++": SLOTS, "slots without C++": SLOTS, "windows on TPU": TPU}
NARROW = jnp.float32, jnp.bfloat16
ALL = *NARROW, jnp.float8_e4m3fn, jnp.int32, jnp.bool
CASES = [
    (form, dtype, shape)
    for form in FORMS
    for dtype in (ALL if "slots" in form else NARROW)
    for shape in ([(), (5,), (3, 20_000)] if "slots" in form else [(rows, 128) for rows in (1, 2, 3, 5, 8)])
]
EACH = pytest.mark.parametrize(("form", "dtype", "shape"), CASES, indirect=["form"])
# One slot is read by two rows, the null slot by two.
READ, WRITE = ints([3, 0, 8, 3, 1, 0]), ints([5, 0, 8, 2, 0, 1])


@pytest.fixture
def form(request, monkeypatch):
    """A function that reads, and one that writes."""
    if request.param == "slots without C++":
        monkeypatch.setattr(native, "WHY_MISSING", "not built")
    elif "C++" in request.param and native.WHY_MISSING is not None:
        pytest.skip(f"native operations: {native.WHY_MISSING}")
    read, write = FORMS[request.param]
    # Traced anew by each test: what is missing is looked up then.
    return (lambda *given: read(*given)), (lambda *given: write(*given))


def numbers(count, dtype, *shape):
    """With anything in slot 0."""
    found = np.random.default_rng(count).normal(size=(count, *shape))
    found[0] = np.nan if jnp.issubdtype(dtype, jnp.floating) else 7
    return found.astype(dtype)


@pytest.mark.smoke("form")
@EACH
def test_reads(form, dtype, shape):
    store = numbers(9, dtype, *shape)
    expected = store[READ]
    expected[[1, 5]] = 0
    assert_same_bits(jax.jit(form[0])(store, READ), expected)


@pytest.mark.smoke("form")
@EACH
def test_writes(form, dtype, shape):
    store, values, run = numbers(9, dtype, *shape), numbers(6, np.float32, *shape), jax.jit(form[1])
    for places in (WRITE, 0 * WRITE):
        expected = store.copy()
        expected[places[places > 0]] = np.asarray(jnp.asarray(values).astype(dtype))[places > 0]
        assert_same_bits(run(store, values, places)[1:], expected[1:])


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_what_is_read_is_what_was_there(form):
    """Also by a read that nothing ties to the write."""
    read, write = form

    def turn(store, values, source, target):
        found = read(store, source)
        return write(write(store, found * 2, target), values, target + 4), found, read(store, target + 4)

    store, values = numbers(9, np.float32, 3, 128), np.ones((3, 3, 128), np.float32)
    source, target = ints([1, 2, 3]), ints([1, 4, 3])
    after, found, before = jax.jit(turn, donate_argnums=0)(jnp.asarray(store), values, source, target)
    assert_same_bits(found, store[source])
    assert_same_bits(before, store[target + 4])
    expected = store.copy()
    expected[target], expected[target + 4] = 2 * store[source], values
    assert_same_bits(after[1:], expected[1:])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", [name for name in FORMS if "TPU" not in name], indirect=True)
def test_in_place(form, dtype):
    def move(store, source, target):
        return form[1](store, form[0](store, source), target)

    assert_in_place(move, np.zeros((20_000, 3, 128), dtype), READ, WRITE)


@pytest.mark.parametrize(("most", "blocks"), [(1, 6), (2, 3), (4, 2), (99, 1)])
def test_blocks_of_windows_on_tpu(monkeypatch, most, blocks):
    """As many rows at a time as there is room for, and as divide them all."""
    store, (read, write) = numbers(9, np.float32, 3, 128), TPU
    monkeypatch.setattr(pallas_tpu, "BLOCK_BYTES", most * 4 * 128 * 4)  # three rows are padded to four
    index = ints([3, 0, 8, 3, 1, 5])
    assert len(index) // pallas_tpu._rows_at_once(*on_device((store, index))) == blocks
    assert_same_bits(read(*on_device((store, index)))[index > 0], store[index[index > 0]])
    values, there = numbers(6, np.float32, 3, 128), ints([3, 0, 8, 2, 1, 5])
    after = write(*on_device((store, values, there)))
    assert_same_bits(after[there[there > 0]], values[there > 0])
    assert_same_bits(after[ints([4, 6, 7])], store[[4, 6, 7]])


def test_windows_say_what_they_cannot_run():
    with pytest.raises(UnsupportedError, match="100 channels, not a multiple of 128"):
        TPU[0](*on_device((numbers(3, np.float32, 3, 100), ints([1]))))


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
