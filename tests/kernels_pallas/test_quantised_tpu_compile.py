"""Products with quantised weights compiled by the TPU's own compiler, at the sizes of real models: no wide copy of a
weight is written to memory, and the kernels read weights where they lie.
"""

import functools

import jax.numpy as jnp
import pytest
from real_shapes import BF16, F32, nbytes, shape
from topology import compile_for_tpu

from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear
from kernels_pallas.quantised import Quantised, bits_of

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

FORMS = {
    "int8": (jnp.int8, None, None),
    "fp8": (jnp.float8_e4m3fn, None, None),
    "int4": (jnp.int4, 64, BF16),
    "nvfp4": (jnp.float4_e2m1fn, 16, jnp.float8_e4m3fn),
}
CASES = [("v5e", "int8"), ("v6e", "int4"), ("tpu7x", "fp8"), ("tpu7x", "nvfp4")]


def quantised(form, *sizes):
    dtype, group, scale = FORMS[form]
    *lead, outputs, inputs = sizes
    channels = None if form == "int4" else shape(*lead, outputs, dtype=F32)
    return Quantised(
        shape(*sizes, dtype=dtype), channels, shape(*lead, inputs // group, outputs, dtype=scale) if group else None
    )


def narrow_bytes(weight):
    return weight.values.size * bits_of(weight.values.dtype) // 8


@pytest.mark.parametrize(("slice_name", "form"), CASES)
def test_dense(slice_name, form):
    weight = quantised(form, 21504, 4096)  # Nemotron-H-8B
    implementation = "pallas_tpu" if FORMS[form][1] else "xla"
    run = functools.partial(linear, implementation=implementation)
    compiled = compile_for_tpu(slice_name, run, shape(64, 4096, dtype=BF16), weight)
    assert compiled.memory_analysis().temp_size_in_bytes < narrow_bytes(weight) / 8


@pytest.mark.parametrize(("outputs", "inputs"), [(1856, 2688), (2688, 1856)], ids=["up", "down"])
@pytest.mark.parametrize(("slice_name", "form"), CASES)
def test_experts(slice_name, form, outputs, inputs):
    weight = quantised(form, 128, outputs, inputs)  # Nemotron-3-Nano
    run = functools.partial(grouped_matmul, implementation="pallas_tpu")
    compiled = compile_for_tpu(slice_name, run, shape(384, inputs, dtype=BF16), weight, shape(128, dtype=jnp.int32))
    assert compiled.memory_analysis().temp_size_in_bytes < narrow_bytes(weight) / 7


def test_4_bit_floats_on_older_tpus():
    weight = quantised("nvfp4", 128, 1856, 2688)
    run = functools.partial(grouped_matmul, implementation="pallas_tpu_codes")
    compiled = compile_for_tpu("v6e", run, shape(384, 2688, dtype=BF16), weight, shape(128, dtype=jnp.int32))
    # The values may be copied as they are: never wide.
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * narrow_bytes(weight)
    assert nbytes(weight.group_scale) < narrow_bytes(weight)
