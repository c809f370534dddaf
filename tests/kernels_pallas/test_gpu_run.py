"""Triton kernels on a GPU: `JAX_PLATFORMS=cuda pytest -m gpu`. (`mamba-jax check` times them.)"""

import dataclasses

import jax
import pytest
from model_calls import BF16, F32, OPERATIONS, call_of

from mamba_jax.kernel_check.compare import WIDE, compiled_comparison
from mamba_jax.kernel_check.compiling import Compiler

pytestmark = pytest.mark.gpu
CASES = [
    pytest.param(name, shape, id=f"{name} {shape.name}")
    for name, (_, implementations, shapes) in OPERATIONS.items()
    for shape in shapes[:2]
    if any(one.name == "pallas_gpu" for one in implementations) and name != "expert_choice"
]


@pytest.mark.parametrize("store", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize(("operation", "shape"), CASES)
def test_kernel_equals_xla(operation, shape, dtype, store):
    """For rows of all classes; other slots stay as they are."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    shape = dataclasses.replace(shape, rows=min(shape.rows, 16)) if hasattr(shape, "rows") else shape
    call = call_of(operation, shape, dtype, store)
    args, kwargs = call.split(call.arguments)
    if why := next(one for one in call.candidates if one.name == "pallas_gpu").why_not(args, kwargs):
        pytest.skip(why)
    found = compiled_comparison(call, "pallas_gpu", Compiler())()
    assert not found.wrong
    if BF16 not in (dtype, store):
        assert max(found.y, found.states) <= 2e-4 / WIDE
