"""The dense product against its definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.workloads import PRODUCTS
from kernels_pallas import native
from kernels_pallas.dispatch import KernelChoice, UnsupportedError
from kernels_pallas.linear import linear, linear_pair, reference

pytestmark = pytest.mark.full

needs_native = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [s.small() for s in PRODUCTS], ids=lambda s: s.name)
def test_equals_definition(shape, dtype):
    check(shape.rows, shape.inputs, shape.outputs, dtype, "xla")


@pytest.mark.smoke
@needs_native
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 24), (1040, 5), (77, 131), (16, 1), (3, 2)])
def test_native_equals_definition(rows, inputs, outputs):
    check(rows, inputs, outputs, jnp.bfloat16, "native")


@needs_native
def test_native_rows_do_not_depend_on_each_other():
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(7, 2100)), jnp.bfloat16)
    weight = jnp.asarray(random.normal(size=(13, 2100)), jnp.bfloat16)
    run = jax.jit(lambda x: linear(x, weight, out_dtype=jnp.float32, implementation="native"))
    for rows in (1, 2, 3, 5):
        np.testing.assert_array_equal(run(x[:rows]), run(x)[:rows])


@needs_native
def test_native_runs_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(native, "few_rows", lambda: 8)
    few, narrow = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((8, 32), jnp.bfloat16)
    choice = KernelChoice(platform="cpu")
    with choice.applied():
        linear(few, narrow)
    assert choice.chosen == {"linear": {"native": ""}}
    for x, weight, why in [
        (few.astype(jnp.float32), narrow.astype(jnp.float32), "weights are float32"),
        (jnp.ones((9, 32), jnp.bfloat16), narrow, "9 rows, not 1 to 8"),
        (few[:0], narrow, "0 rows"),
    ]:
        with pytest.raises(UnsupportedError, match=why):
            linear(x, weight, implementation="native")


@needs_native
@pytest.mark.parametrize("rows", [9, 25, 70, 600])
def test_native_runs_all_rows_without_bfloat16_instructions(monkeypatch, rows):
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    choice = KernelChoice(platform="cpu")
    with choice.applied():
        check(rows, 300, 50, jnp.bfloat16, None)
    assert choice.chosen == {"linear": {"native": ""}}


def check(rows, inputs, outputs, dtype, implementation):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, inputs)), dtype)
    weight = jnp.asarray(random.normal(size=(outputs, inputs)), dtype)
    run = jax.jit(lambda x, w: linear(x, w, out_dtype=jnp.float32, implementation=implementation))
    np.testing.assert_allclose(run(x, weight), reference.linear(x, weight), atol=2e-6 * inputs, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 65])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_few_outputs(rows, dtype):
    check(rows, 300, 33, dtype, "xla_few_outputs")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_two_products_of_few_outputs(dtype):
    random = np.random.default_rng(0)
    x, first, second = (jnp.asarray(random.normal(size=(n, 300)), dtype) for n in (8, 33, 33))

    def run(*args, by):
        return linear_pair(*args, out_dtype=jnp.float32, implementation=by)

    sums = jax.jit(partial(run, by="xla_few_outputs"))(x, first, second)
    for out, weight in zip(sums, (first, second), strict=True):
        np.testing.assert_allclose(out, reference.linear(x, weight), atol=2e-6 * 300, rtol=1e-5)

    def loss(by, *args):
        return sum((jnp.sin(out).sum() for out in run(*args, by=by)), jnp.float32(0))

    ours, apart = (
        jax.grad(partial(loss, by), argnums=(0, 1, 2))(x, first, second) for by in ("xla_few_outputs", "apart")
    )
    for one, other in zip(ours, apart, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_gradients(rows):
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(rows, 24)), jnp.float32)
    weight = jnp.asarray(random.normal(size=(40, 24)), jnp.float32)
    ours = jax.grad(lambda x, w: jnp.sin(linear(x, w)).sum(), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: jnp.sin(x @ w.T).sum(), argnums=(0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, plain)


@needs_native
def test_native_gradients():
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(3, 24)), jnp.bfloat16)
    weight = jnp.asarray(random.normal(size=(40, 24)), jnp.bfloat16)

    def gradients(implementation):
        def loss(x, w):
            return jnp.sin(linear(x, w, out_dtype=jnp.float32, implementation=implementation)).sum()

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    for ours, plain in zip(gradients("native"), gradients("xla"), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(np.float32), plain.astype(np.float32), atol=2e-2)


def test_refuses_shapes_that_do_not_fit_and_unknown_names():
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\), expected \[outputs, inputs\] with inputs = 3"):
        linear(jnp.ones((2, 3)), jnp.ones((5, 4)))
    with pytest.raises(UnsupportedError, match="there are: native, invariant, xla_few_outputs, xla_few_outputs, xla"):
        linear(jnp.ones((2, 3)), jnp.ones((5, 3)), implementation="cuda")
