"""Dense and grouped products against their definitions. The kernel that JAX keeps for TPU is interpreted, and those in
C++ run with each instruction set that this processor has: one library holds them all.
"""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_shapes import GROUPED_PRODUCTS, PRODUCTS, GroupedProduct
from operation_checks import Draw, assert_close, assert_same_gradients, grouped_product, jitted, needs_native, product

from kernels_pallas import native
from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.pallas_tpu import lies_inputs_first
from kernels_pallas.linear import linear, linear_pair
from tests.support.selection import slow

pytestmark = pytest.mark.full

F32, BF16 = jnp.float32, jnp.bfloat16
DTYPES = (np.float32, BF16)


def cases(*values):
    """Cases of an implementation, named first; those of the native one where there is one."""
    return [pytest.param(*each, marks=needs_native if each[0] == "native" else ()) for each in values]


DENSE = cases(
    *(("xla", s.rows, s.inputs, s.outputs, dtype) for s in (p.small() for p in PRODUCTS) for dtype in DTYPES),
    *(("native", rows, *sizes, BF16) for rows in (1, 3, 4, 7) for sizes in ((4096, 24), (1040, 5), (77, 131), (3, 2))),
    *(("xla_few_outputs", rows, 300, 33, dtype) for rows in (1, 8, 65) for dtype in DTYPES),
)


@pytest.mark.smoke("implementation")
@pytest.mark.parametrize(("implementation", "rows", "inputs", "outputs", "dtype"), DENSE)
def test_dense_equals_definition(implementation, rows, inputs, outputs, dtype):
    x, weight = (Draw(seed).normal(n, inputs, dtype=dtype) for seed, n in enumerate((rows, outputs)))
    out = jitted(linear, out_dtype=F32, implementation=implementation)(x, weight)
    np.testing.assert_allclose(out, product(x, weight), atol=2e-6 * inputs, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("rows", [9, 70, 600])
def test_native_runs_all_rows_without_bfloat16_instructions(monkeypatch, rows):
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    choice = KernelChoice(platform="cpu")
    x, weight = jnp.ones((rows, 300), BF16), jnp.ones((50, 300), BF16)
    with choice.applied():
        np.testing.assert_array_equal(linear(x, weight, out_dtype=F32), np.full((rows, 50), 300.0))
    assert choice.chosen == {"linear": {"native": ""}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_products_of_few_outputs(dtype):
    x, first, second = (jnp.asarray(Draw(n).normal(n, 300, dtype=dtype)) for n in (8, 33, 33))

    def run(*args, by):
        return linear_pair(*args, out_dtype=F32, implementation=by)

    sums = jax.jit(partial(run, by="xla_few_outputs"))(x, first, second)
    for out, weight in zip(sums, (first, second), strict=True):
        np.testing.assert_allclose(out, product(x, weight), atol=2e-6 * 300, rtol=1e-5)

    def loss(by, *args):
        return sum((jnp.sin(out).sum() for out in run(*args, by=by)), F32(0))

    ours, apart = (
        jax.grad(partial(loss, by), argnums=(0, 1, 2))(x, first, second) for by in ("xla_few_outputs", "apart")
    )
    for one, other in zip(ours, apart, strict=True):
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), atol=0.1, rtol=0.02)


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\), expected \[outputs, inputs\] with inputs = 3"):
        linear(jnp.ones((2, 3)), jnp.ones((5, 4)))


SHAPES = [s.small() for s in GROUPED_PRODUCTS]
ODD = SHAPES[-1]
INPUTS_FIRST = dataclasses.replace(ODD, name="outputs innermost in memory", inputs=72, outputs=128)
WIDE = GroupedProduct("more than is multiplied at a time", 9, 2, 1100, 480)
FEW = [GroupedProduct("few tokens", 2 * n, n, i, o) for n, o, i in ((16, 130, 1100), (5, 3, 17), (1, 64, 64))]
TPU = "pallas_tpu_interpreted"
GROUPED = cases(
    *(("xla", shape, dtype) for shape in (*SHAPES, WIDE) for dtype in DTYPES),
    *((TPU, shape, dtype) for shape in (ODD, INPUTS_FIRST, WIDE) for dtype in DTYPES),
    *(("native", shape, dtype) for shape in FEW for dtype in DTYPES),
)


def sizes(draw, shape, used):
    """Group sizes that sum to `used`: uneven, some of them empty, and those of the last expert alone."""
    expert = draw.random.integers(0, shape.experts, used) // 2 * 2 % shape.experts
    yield np.bincount(expert, minlength=shape.experts).astype(np.int32)
    yield np.where(np.arange(shape.experts) == shape.experts - 1, used, 0).astype(np.int32)


@pytest.mark.smoke("implementation")
@pytest.mark.parametrize(
    ("implementation", "shape", "dtype"), [*GROUPED, *(slow(TPU, SHAPES[0], dtype) for dtype in DTYPES)]
)
def test_grouped_equals_definition(implementation, shape, dtype):
    draw = Draw()
    x = draw.normal(shape.tokens, shape.inputs, dtype=dtype)
    w = draw.normal(shape.experts, shape.outputs, shape.inputs, dtype=dtype)
    run = jitted(grouped_matmul, implementation=implementation)
    for used in (shape.tokens, shape.tokens // 2, 0):
        for group_sizes in sizes(draw, shape, used):
            out = run(x, w, group_sizes)
            assert out.dtype == dtype
            assert_close(out, grouped_product(x, w, group_sizes), dtype)


@pytest.mark.parametrize(
    ("implementation", "shape", "used"),
    cases(("xla", ODD, 77), ("xla", ODD, 60), (TPU, ODD, 77), (TPU, ODD, 60), ("native", FEW[1], 7)),
)
def test_gradients_of_grouped_products(implementation, shape, used):
    draw = Draw()
    x, w = draw.normal(shape.tokens, shape.inputs), draw.normal(shape.experts, shape.outputs, shape.inputs)
    group_sizes, _ = sizes(draw, shape, used)
    expert = np.repeat(np.arange(shape.experts), group_sizes)

    def plain(x, w):
        return jnp.einsum("ti,toi->to", x[:used], w[expert])

    def ours(x, w):
        return grouped_matmul(x, w, jnp.asarray(group_sizes), implementation=implementation)

    assert_same_gradients(ours, plain, (x, w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_does_not_multiply_every_token_by_every_expert(dtype):
    x, w = jnp.ones((64, 256), dtype), jnp.ones((32, 128, 256), dtype)
    memory = jax.jit(partial(grouped_matmul, implementation="xla")).lower(x, w, jnp.full(32, 2)).compile()
    assert memory.memory_analysis().temp_size_in_bytes < w.nbytes / 2


def test_weights_that_lie_inputs_first():
    assert lies_inputs_first((INPUTS_FIRST.experts, INPUTS_FIRST.outputs, INPUTS_FIRST.inputs))
    assert not lies_inputs_first((ODD.experts, ODD.outputs, ODD.inputs))


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


# Other tests have the widest set of the processor.
@needs_native
@pytest.mark.full
@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"])
def test_products_are_right_with_each_instruction_set(instructions):
    widest = native.instructions()
    order = ["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"]
    if order.index(instructions) > order.index(widest):
        pytest.skip(f"the processor has {widest}, not {instructions}")
    environment = {**os.environ, "MAMBA_JAX_INSTRUCTIONS": instructions, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == instructions
