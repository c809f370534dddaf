"""The grouped product that widens weights in registers: interpreted by JAX 0.12, and compiled for an H200."""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_calls import BF16, F32, published, shape
from operation_checks import Draw, assert_close, grouped_product, product
from test_quantized_products import by_definition, quantized
from topology import compile_for_gpu, described_device

from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.grouped_matmul import grouped_matmul, quantized_gpu
from kernels_pallas.linear import linear
from kernels_pallas.linear import quantized_gpu as linear_gpu
from kernels_pallas.quantized import Quantized
from tests.support.selection import slow

pytestmark = pytest.mark.full

I32 = jnp.int32
INT8, FP8, INT4, FP4 = jnp.int8, jnp.float8_e4m3fn, jnp.int4, jnp.float4_e2m1fn


def interpreter():
    mosaic = importlib.import_module(quantized_gpu.MODULE)
    if not hasattr(mosaic, "InterpretGPUParams"):
        pytest.skip(f"JAX {jax.__version__} has no interpreter of Mosaic GPU (0.12 has)")
    return mosaic.InterpretGPUParams(detect_races=True, on_race="raise")


def interpreted(x, weight, sizes):
    """Runs the kernel by the interpreter, which raises an error where it finds a race."""
    assert quantized_gpu.unsupported(x, weight, sizes) is None
    parameters = interpreter()
    run = jax.jit(lambda *call: quantized_gpu.grouped_matmul(*call, parameters))
    return run(jnp.asarray(x), weight, jnp.asarray(sizes, I32))


@pytest.mark.parametrize(
    ("dtype", "groups", "zero"),
    [
        (INT8, None, False),
        (FP8, None, False),
        (INT4, None, False),
        (INT4, 2, False),  # as long as a block
        (INT4, 8, True),  # shorter: 32
        (INT4, 2, True),
        (FP4, 16, False),  # groups of 16
        (FP4, None, False),
        (FP8, 4, False),
    ],
)
def test_equals_definition(dtype, groups, zero):
    weight = quantized(4, 128, 256, dtype=dtype, groups=groups, zero=zero)
    for tokens, sizes in ((21, [3, 0, 9, 6]), (5, [0, 2, 3, 0])):
        x = Draw().normal(tokens, 256, dtype=BF16)
        out = interpreted(x, weight, sizes)
        assert out.dtype == BF16
        assert_close(out, grouped_product(x, by_definition(weight), sizes), BF16, tolerance=8e-3)


def test_scales_in_fewer_bits_and_no_channel_scale():
    weight = quantized(2, 64, 128, dtype=FP4, groups=8)
    narrow = Quantized(weight.values, None, weight.group_scale.astype(FP8))
    exact = Quantized(weight.values, jnp.ones((2, 64)), narrow.group_scale)
    x, sizes = Draw().normal(9, 128, dtype=BF16), [4, 5]
    assert_close(interpreted(x, narrow, sizes), grouped_product(x, by_definition(exact), sizes), BF16, tolerance=8e-3)


def test_several_blocks_of_tokens_of_one_expert():
    weight, x = quantized(3, 64, 64, dtype=INT8), Draw().normal(90, 64, dtype=BF16)
    for sizes in ([1, 85, 2], [0, 0, 90], [0, 0, 0]):
        out = interpreted(x, weight, sizes)
        assert_close(out, grouped_product(x, by_definition(weight), sizes), BF16, tolerance=8e-3)


def test_a_dense_weight_with_groups():
    weight, x = quantized(128, 128, dtype=INT4, groups=2, zero=True), Draw().normal(3, 5, 128, dtype=BF16)
    run = jax.jit(lambda x, w: linear_gpu.linear(x, w, out_dtype=BF16, interpret=interpreter()))
    expected = product(x, by_definition(weight))
    assert_close(run(jnp.asarray(x), weight), expected, BF16, tolerance=8e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "form", "dtype", "why"),
    [
        (64, 4096, {}, BF16, None),
        (65, 4096, {}, BF16, "65 rows"),
        (4, 4096, {}, F32, "its result"),
        (4, 2048, {}, BF16, "2048 outputs"),
        (4, 4096, {"dtype": FP4}, BF16, "4-bit floats"),
        (4, 4096, {"groups": None}, BF16, "XLA fuses"),
    ],
)
def test_dense_weights_that_it_takes(rows, outputs, form, dtype, why):
    weight = quantized(outputs, 128, **{"dtype": INT4, "groups": 2} | form)
    said = linear_gpu.unsupported(jnp.ones((rows, 128), BF16), weight, out_dtype=dtype)
    assert said is None if why is None else why in said


def test_every_4_bit_float():
    codes = jnp.arange(-8, 8, dtype=jnp.int8).astype(INT4)
    values = jax.lax.bitcast_convert_type(codes, FP4)
    assert_close(quantized_gpu._to_float32(codes, FP4), np.asarray(values).astype(np.float32))


@pytest.mark.parametrize(
    ("sizes", "form", "why"),
    [
        ((96, 128), {}, "weights are 96 x 128, not multiples of 64"),
        ((64, 192), {"groups": 2}, "groups of 96 inputs"),
        ((64, 128), {"groups": 1, "zero": True}, "1 rows of int8 scales are not divisible by 2"),
    ],
)
def test_what_it_leaves_to_others(sizes, form, why):
    weight = quantized(2, *sizes, dtype=INT4, **form)
    assert why in quantized_gpu.unsupported(jnp.ones((4, sizes[1]), BF16), weight, None)


NANO, SUPER, QWEN = (128, 1856, 2688), (512, 2688, 1024), (512, 1024, 2048)
SMALL = (72, 1536, 4096)
"""Experts, outputs and inputs: up, or gate and up of QWEN (Qwen3-Next) and SMALL (Granite-4.0-H-Small)."""
FEW = [("int8", NANO, 384), ("nvfp4", SUPER, 1408)]
CALLS = [
    (form, expert, tokens)
    for forms, experts, calls in (
        (("int8", "fp8", "int4"), (NANO, QWEN, SMALL), (6, 384, 12288)),
        (("nvfp4",), (NANO, SUPER), (22, 1408, 45056)),
        (("gptq",), (QWEN,), (10, 640)),
    )
    for form in forms
    for expert in experts
    for tokens in calls
]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("form", "expert", "tokens"), [*FEW, *(slow(*c) for c in CALLS if c not in FEW)])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_published_sizes(form, expert, tokens, direction, monkeypatch, capfd):
    """No registers are spilled, and memory holds no wide weight: only sizes of groups and their sums."""
    experts, outputs, inputs = expert
    if direction == "down":
        outputs, inputs = inputs, outputs // (1 if expert in (NANO, SUPER) else 2)
    weight = published(form, experts, outputs, inputs)
    x = shape(tokens, inputs, dtype=BF16)
    assert quantized_gpu.unsupported(x, weight, None) is None
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compile_for_gpu("h200", quantized_gpu.grouped_matmul, x, weight, shape(experts, dtype=I32))
    said = "".join(capfd.readouterr())
    ((used,), (spilled,)) = (re.findall(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    assert int(used) <= 128
    assert int(spilled) == 0
    # The result of at least 8 tokens is cut, or tokens of no expert are set to 0: a copy of it, not of a weight.
    assert program.memory_analysis().temp_size_in_bytes < 2 * (tokens + 8) * (inputs + outputs) + 32_768


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("form", "outputs", "inputs"), [("int4", 17408, 5120), ("gptq", 5120, 17408)])
@pytest.mark.parametrize("rows", [1, 64])
def test_dense_weights(form, outputs, inputs, rows, monkeypatch, capfd):
    """Of Qwen3.5-27B's MLP, up and down."""
    weight = published(form, outputs, inputs)
    x = shape(rows, inputs, dtype=BF16)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    program = compile_for_gpu("h200", functools.partial(linear, implementation="pallas_gpu"), x, weight)
    assert re.findall(r"(\d+) bytes spill stores", "".join(capfd.readouterr())) == ["0"]
    assert program.memory_analysis().temp_size_in_bytes < 2 * (rows + 8) * (inputs + outputs) + 32_768


@pytest.mark.gpu_compile
def test_is_chosen_for_hopper():
    choice = KernelChoice(platform="gpu", device=described_device("h200"))
    weight = published("int8", *NANO)
    with choice.applied():
        jax.eval_shape(grouped_matmul, shape(384, 2688, dtype=BF16), weight, shape(128, dtype=I32))
    assert list(choice.chosen["quantized_grouped_matmul"]) == ["pallas_gpu"]
