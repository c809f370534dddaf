"""The dense product against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.linear import linear, reference
from kernels_pallas.linear.shapes import SHAPES


@pytest.mark.parametrize("implementation", ["xla"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [s.small() for s in SHAPES], ids=lambda s: s.name)
def test_equals_definition(shape, dtype, implementation):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(shape.rows, shape.inputs)), dtype)
    weight = jnp.asarray(random.normal(size=(shape.outputs, shape.inputs)), dtype)
    run = jax.jit(lambda x, w: linear(x, w, out_dtype=jnp.float32, implementation=implementation))
    np.testing.assert_allclose(run(x, weight), reference.linear(x, weight), atol=2e-6 * shape.inputs, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_gradients(rows):
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(rows, 24)), jnp.float32)
    weight = jnp.asarray(random.normal(size=(40, 24)), jnp.float32)
    ours = jax.grad(lambda x, w: jnp.sin(linear(x, w)).sum(), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: jnp.sin(x @ w.T).sum(), argnums=(0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), ours, plain)


def test_refuses_shapes_that_do_not_fit_and_unknown_names():
    with pytest.raises((ValueError, TypeCheckError)):  # the latter where annotations are checked, as in this suite
        linear(jnp.ones((2, 3)), jnp.ones((5, 4)))
    with pytest.raises(UnsupportedError, match="there are: xla"):
        linear(jnp.ones((2, 3)), jnp.ones((5, 3)), implementation="cuda")
