"""What the tests of all operations share."""

import contextlib
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import native
from tests.support import cpu_options

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.dtype("bfloat16")], ids=["float32", "bfloat16"])
needs_native = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")

ELSEWHERE = "xla elsewhere"
"""Plain JAX in its form for accelerators, as an implementation's name for `jitted`."""


@contextlib.contextmanager
def form(implementation):
    """Traces operations in the form of `ELSEWHERE`; yields the name that they know."""
    if implementation != ELSEWHERE:
        yield implementation
        return

    def choose(*arrays, default, **forms):
        return forms.get("tpu", default)(*arrays)

    with mock.patch("jax.lax.platform_dependent", choose):
        yield "xla"


class Draw:
    """Random arrays of one seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def normal(self, *shape, scale=1.0, dtype=np.float32):
        return (scale * self.random.normal(size=shape)).astype(dtype)

    def slots(self, count: int, *shape) -> np.ndarray:
        """Distinct slots of 1..count-1."""
        return (1 + self.random.permutation(count - 1)[: int(np.prod(shape))]).reshape(shape).astype(np.int32)


def ints(values):
    """An array of indices."""
    return np.array(values, np.int32)


def on_device(tree):
    """numpy arrays as JAX arrays; anything else as it is."""
    return jax.tree.map(lambda v: jnp.asarray(v) if isinstance(v, np.ndarray) else v, tree)


@functools.cache
def jitted(operation, *, implementation=None, emitters_of_users=False, **static):
    """operation(*arrays, **arrays) compiled (once for all tests), taking numpy arrays and giving them.

    emitters_of_users: compile with the fusion emitters that XLA has by default. Tests have the older ones, which round
    an interpreted kernel differently inside and outside a loop.
    """
    options = cpu_options.OF_USERS if emitters_of_users else None

    def run(args, kwargs):
        with form(implementation) as name:
            return operation(*args, **kwargs, **static, **({} if name is None else {"implementation": name}))

    run = jax.jit(run, compiler_options=options)
    return lambda *args, **kwargs: jax.tree.map(np.asarray, run(on_device(args), on_device(kwargs)))


def product(x, weight):
    """The definition of the dense product, in float64."""
    x, weight = (np.asarray(v).astype(np.float64) for v in (x, weight))
    return x @ weight.T


def grouped_product(x, w, sizes):
    """The definition of the grouped product, in float64."""
    x, out = np.asarray(x).astype(np.float64), np.zeros((len(x), w.shape[1]))
    for row, expert in enumerate(np.repeat(range(len(w)), sizes)):
        out[row] = np.asarray(w[expert]).astype(np.float64) @ x[row]
    return out


def assert_close(actual, expected, dtype=np.float32, tolerance=None):
    """Equal up to the rounding of `dtype`, relative to the largest value."""
    expected = np.asarray(expected).astype(np.float64)
    if tolerance is None:
        tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-5
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), expected, rtol=0, atol=tolerance * scale)


def assert_same_bits(actual, expected):
    """Equal bit for bit, NaN included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def assert_same_gradients(one, other, *calls, tolerance=None):
    """Of the sines of what two functions give, by all arguments of each call."""

    def gradients(function):
        def loss(call):
            return sum(jnp.sin(each).sum() for each in jax.tree.leaves(function(*call)))

        run = jax.jit(jax.grad(loss))
        return jax.tree.leaves([run(on_device(call)) for call in calls])

    for actual, expected in zip(gradients(one), gradients(other), strict=True):
        assert np.isfinite(actual).all()
        assert_close(actual, expected, tolerance=tolerance)


def assert_in_place(operation, store, *args, **kwargs):
    """`operation(store, *args, **kwargs)`, compiled with its store donated, holds no second store and copies none.

    The store may be several arrays. Shapes suffice.
    """
    run = jax.jit(lambda store, args, kwargs: operation(store, *args, **kwargs), donate_argnums=0)
    compiled = run.lower(on_device(store), on_device(args), on_device(kwargs)).compile()
    memory, arrays = compiled.memory_analysis(), jax.tree.leaves(store)
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    assert memory.alias_size_in_bytes == sum(sizes)
    assert memory.temp_size_in_bytes < max(sizes) / 4
    for array in arrays:
        shape = ",".join(str(n) for n in array.shape)
        assert not re.findall(rf"\w+\[{shape}\]\S* (?:copy|convert|transpose)\(", compiled.as_text())
