"""The C++ products with each instruction set that this processor has: one library holds them all."""

import os
import subprocess
import sys

import pytest
from operation_checks import needs_native

from kernels_pallas import native

PROGRAM = """
import jax.numpy as jnp, numpy as np
from kernels_pallas import fixed_order, native
from kernels_pallas.linear import native as linear

random = np.random.default_rng(0)
few = (1, 96, 120), (3, 77, 13), (5, 2100, 131), (8, 1024, 64)
for rows, inputs, outputs in (*few, (24, 70, 9), (25, 300, 50), (300, 77, 3)):
    x = jnp.asarray(random.normal(size=(rows, inputs)), jnp.float32)
    w = jnp.asarray(random.normal(size=(outputs, inputs)), jnp.bfloat16)
    for some in (x, x.astype(jnp.bfloat16)):
        exact = np.asarray(some, np.float64) @ np.asarray(w, np.float64).T
        got = linear.linear(some, w, out_dtype=jnp.float32)
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-3)
        np.testing.assert_array_equal(linear.linear(some[-1:], w, out_dtype=jnp.float32), got[-1:])
    codes = jnp.asarray(random.integers(-127, 128, size=(outputs, inputs)), jnp.int8)
    exact = np.asarray(x, np.float64) @ np.asarray(codes, np.float64).T
    np.testing.assert_allclose(fixed_order.product(x, codes), exact, rtol=1e-4, atol=1e-1)
print(native.instructions())
"""


@needs_native
@pytest.mark.parametrize("instructions", ["amx_bf16", "avx512_bf16", "avx512", "avx2", "baseline"])
def test_products_are_right_with_each_instruction_set(instructions):
    widest = native.instructions()
    order = ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
    if order.index(instructions) > order.index(widest):
        pytest.skip(f"the processor has {widest}, not {instructions}")
    environment = {**os.environ, "MAMBA_JAX_INSTRUCTIONS": instructions, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == instructions
