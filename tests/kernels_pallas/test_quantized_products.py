"""Products with quantized weights: those with the weights that they stand for. And of inputs that are rounded to the
weight's own 8 bits: their definition, and what accelerators compile.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_calls import BF16, F32, shape
from operation_checks import Draw, assert_close, grouped_product, jitted, needs_native, product
from topology import compile_for_gpu, compile_for_tpu

from kernels_pallas import native
from kernels_pallas.dispatch import KernelChoice, UnsupportedError
from kernels_pallas.grouped_matmul import grouped_matmul, pallas_gpu, quantized_tpu, xla
from kernels_pallas.linear import linear, narrow_inputs
from kernels_pallas.quantized import Quantized
from tests.support.selection import slow

pytestmark = pytest.mark.full

DTYPES = [jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float4_e2m1fn]


def quantized(*shape, dtype=jnp.int8, groups=None, zero=False):
    """A random weight [*lead, outputs, inputs]: with a scale per channel, and for each group if there are any."""
    random = np.random.default_rng(3)
    *lead, outputs, _ = shape
    integer = jnp.issubdtype(dtype, jnp.integer)
    values = random.integers(-8, 8, shape) if integer else 2 * random.normal(size=shape)
    return Quantized(
        jnp.asarray(values).astype(dtype),
        jnp.asarray(0.1 * random.random((*lead, outputs)) + 0.05, jnp.float32),
        jnp.asarray(random.random((*lead, groups, outputs)) + 0.5, jnp.float32) if groups else None,
        jnp.asarray(random.integers(-3, 3, (*lead, groups, outputs)), jnp.int8) if zero else None,
    )


def by_definition(weight):
    """The weight, element by element."""
    values, channel, scale, zero = (
        None if v is None else np.asarray(v).astype(np.float64)
        for v in (weight.values, weight.channel_scale, weight.group_scale, weight.group_zero)
    )
    out = np.empty(values.shape)
    for index in np.ndindex(values.shape):
        *lead, o, i = index
        g = 0 if scale is None else i // (values.shape[-1] // scale.shape[-2])
        one = values[index] - (0 if zero is None else zero[(*lead, g, o)])
        out[index] = one * (1 if scale is None else scale[(*lead, g, o)]) * channel[(*lead, o)]
    return out


FORMS = [
    pytest.param({"dtype": dtype, "groups": groups, "zero": zero}, id=f"{dtype.__name__} {groups} {zero}")
    for dtype in DTYPES
    for groups, zero in ((None, False), (3, False), (3, True))
]


@pytest.mark.smoke
@pytest.mark.parametrize("form", FORMS)
def test_matrix_and_rows_are_of_the_same_weight(form):
    weight = quantized(2, 5, 12, **form)
    flat = by_definition(weight).reshape(10, 12)
    assert_close(weight.matrix().dequantize(), flat)
    assert_close(weight.matrix().take(jnp.asarray([7, 0, 99])).dequantize(), flat[[7, 0, 9]])
    stacked = quantized(3, 2, 5, 12, **form)
    assert_close(stacked.matrix(lead=1).dequantize(), by_definition(stacked).reshape(3, 10, 12))


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_interpreted"])


@pytest.mark.smoke("implementation")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, slow(jnp.bfloat16)], ids=["float32", "bfloat16"])
@IMPLEMENTATIONS
def test_linear(form, dtype, implementation):
    if implementation != "xla" and form["groups"] is None:
        pytest.skip("the kernel is for groups only")
    weight, x = quantized(31, 48, **form), Draw().normal(5, 48, dtype=dtype)
    out = jitted(linear, implementation=implementation)(x, weight)
    assert out.dtype == dtype
    assert_close(out, product(x, by_definition(weight)), dtype)


@pytest.mark.smoke("implementation")
@pytest.mark.parametrize("form", FORMS)
@IMPLEMENTATIONS
def test_grouped(form, implementation):
    check_grouped(implementation, quantized(5, 31, 48, **form), 40, [3, 0, 20, 1, 16], [3, 0, 20, 1, 2], [0] * 5)


@needs_native
def test_native_grouped():
    check_grouped("native", quantized(5, 131, 77), 10, [3, 0, 2, 1, 4], [3, 0, 2, 1, 2], [0] * 5)


def check_grouped(implementation, weight, tokens, *each, **options):
    x = Draw().normal(tokens, weight.shape[2])
    operation = options.pop("operation", grouped_matmul)
    run = jitted(operation, **options, **({"implementation": implementation} if implementation else {}))
    for sizes in each:
        out = run(x, weight, np.asarray(sizes, np.int32))
        assert_close(out, grouped_product(x, by_definition(weight), sizes))


@pytest.mark.parametrize("form", FORMS)
def test_grouped_around_the_kernel_of_gpu(form, monkeypatch):
    """Plain JAX takes the place of the kernel, which has no interpreter: this is of what is widened and scaled."""
    monkeypatch.setattr(pallas_gpu, "grouped_matmul", xla.grouped_matmul)
    weight = quantized(5, 31, 48, **form)
    check_grouped(None, weight, 40, [3, 0, 20, 1, 2], operation=lambda *call: pallas_gpu.widened(*call))


@pytest.mark.parametrize("form", FORMS)
def test_kernel_with_the_outputs_last(form):
    # No whole lanes of inputs, but of outputs.
    check_grouped("pallas_tpu_interpreted", quantized(3, 256, 48, **form), 40, [3, 20, 1])


def test_kernel_takes_4_bit_floats_for_integers():
    weight, options = quantized(2, 31, 48, dtype=jnp.float4_e2m1fn, groups=3), {"codes": True, "interpret": True}
    check_grouped(None, weight, 20, [12, 8], operation=quantized_tpu.grouped_matmul, **options)


@pytest.mark.parametrize("groups", [None, 8, 64])
def test_kernel_over_several_blocks(groups):
    weight, x = quantized(2, 600, 1024, groups=groups), Draw().normal(300, 1024)
    sizes = np.asarray([170, 90], np.int32)
    run = jitted(grouped_matmul, implementation="pallas_tpu_interpreted")
    assert_close(run(x, weight, sizes), jitted(grouped_matmul, implementation="xla")(x, weight, sizes))


@pytest.mark.smoke
@needs_native
@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 24), (77, 131), (3, 2)])
def test_native_linear(rows, inputs, outputs):
    weight, x = quantized(outputs, inputs), Draw().normal(rows, inputs)
    out = jitted(linear, implementation="native")(x, weight)
    np.testing.assert_allclose(out, product(x, by_definition(weight)), atol=2e-6 * inputs, rtol=1e-5)


def test_parts_that_do_not_fit_are_refused_by_name():
    good = quantized(2, 5, 12, groups=3, zero=True)
    good.check("w")
    for part, wrong in (("channel_scale", jnp.ones((5,))), ("group_scale", jnp.ones((2, 5, 5))), ("group_zero", 0)):
        values = {name: getattr(good, name) for name in ("values", "channel_scale", "group_scale", "group_zero")}
        with pytest.raises(ValueError, match=rf"w\.{part} has shape"):
            Quantized(**values | {part: jnp.asarray(wrong)}).check("w")


KINDS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SCALE = np.float32(0.017)


def weight_of(kind):
    scales = jnp.full(31, SCALE).at[:15].set(SCALE / 2)  # two weights were joined
    return dataclasses.replace(quantized(31, 48, dtype=KINDS[kind]), input_scale=scales)


def rounded_product(x, weight):
    """In float64, inputs element by element rounded by ml_dtypes' own conversions."""
    x = np.asarray(x, np.float32) / SCALE
    if weight.values.dtype == jnp.int8:
        q = np.clip(np.rint(x), -128, 127)
    else:
        q = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return SCALE * product(q, by_definition(weight))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_inputs(kind, dtype):
    weight, x = weight_of(kind), Draw().normal(5, 48, dtype=dtype) * 3
    out = jitted(linear, implementation="narrow_inputs")(x, weight)
    assert out.dtype == x.dtype
    assert_close(out, rounded_product(x, weight), dtype)


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def narrow(**changes):
    return lambda: dataclasses.replace(weight_of("int8"), **changes)


@needs_native
@pytest.mark.parametrize(
    ("implementation", "x", "weight", "why"),
    [
        ("native", ones(4, 48, dtype=BF16), ones(8, 48, dtype=BF16), None),
        ("native", ones(4, 48), ones(8, 48), "weights are float32"),
        ("native", ones(9, 48, dtype=BF16), ones(8, 48, dtype=BF16), "9 rows, not 1 to 8"),
        ("native", ones(4, 48), quantized(5, 48), None),
        ("native", ones(4, 48), quantized(5, 48, dtype=jnp.float8_e4m3fn), "weights are not in int8"),
        ("native", ones(4, 48), quantized(5, 48, groups=3), "weights are not in int8"),
        ("native", ones(65, 48), quantized(5, 48), "65 rows, not 1 to 64"),
        ("native", ones(2, 48), narrow(), None),  # a CPU widens unless told otherwise
        ("native", ones(8, 48), ones(4, 8, 48), None),
        ("native", ones(9, 48), ones(4, 8, 48), "9 tokens, not 1 to 2 for each of 4 experts"),
        ("narrow_inputs", ones(2, 48), narrow(input_scale=None), "no scale for its inputs"),
        ("narrow_inputs", ones(2, 48), narrow(values=jnp.ones((31, 48), jnp.int4)), "int4"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_cpu_chooses_and_what_it_cannot_run(implementation, x, weight, why, monkeypatch):
    """In C++ where that is faster, with bfloat16 instructions."""
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(native, "few_rows", lambda: 8)
    weight = weight() if callable(weight) else weight
    operation, *sizes = (grouped_matmul, np.array([2, 2, 2, 2])) if len(weight.shape) == 3 else (linear,)
    choice, call = KernelChoice(platform="cpu"), (jnp.asarray(x), *jax.tree.map(jnp.asarray, (weight, *sizes)))
    if why is None:
        with choice.applied():
            operation(*call)
        assert [list(names) for names in choice.chosen.values()] == [[implementation]]
    else:
        with pytest.raises(UnsupportedError, match=why):
            operation(*call, implementation=implementation)


@pytest.mark.parametrize(
    ("device", "kind", "chosen"),
    [
        ("TPU v5 lite", "int8", True), ("TPU v6 lite", "int8", True), ("TPU7x", "fp8", True),
        ("TPU v6 lite", "fp8", False), ("TPU7x", "int8", False),
    ],
)  # fmt: skip
def test_tpus_round_inputs_to_what_they_multiply(device, kind, chosen, monkeypatch):
    monkeypatch.setattr(narrow_inputs.dispatch, "device_kind", lambda: device)
    reason = narrow_inputs.unsupported_on_tpu(jnp.ones((2, 48)), weight_of(kind), out_dtype=jnp.float32)
    assert reason is None if chosen else device in reason
    without = dataclasses.replace(weight_of(kind), input_scale=None)
    assert narrow_inputs.unsupported_on_tpu(jnp.ones((2, 48)), without, out_dtype=jnp.float32) is not None


CASES = [("v5e", "int8"), ("v6e", "int8"), ("tpu7x", "fp8"), ("h200", "fp8"), ("h200", "int8")]


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("device", "kind"), CASES)
def test_the_compiled_product_is_narrow(device, kind):
    weight = Quantized(shape(4096, 2048, dtype=KINDS[kind]), shape(4096, dtype=F32), input_scale=shape(4096, dtype=F32))
    compile_for = compile_for_gpu if device == "h200" else compile_for_tpu
    run = functools.partial(linear, implementation="narrow_inputs")
    compiled = compile_for(device, run, shape(64, 2048, dtype=BF16), weight)
    text = compiled.as_text()
    (found,) = re.finditer(r"= (\w+)\[[\d,]*\]\S* (?:dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", text)
    operands = [re.findall(rf"%{re.escape(name)} = (\w+)\[", text[: found.start()])[-1] for name in found.groups()[1:]]
    assert operands == [{"int8": "s8", "fp8": "f8e4m3fn"}[kind]] * 2
    assert found[1] == {"int8": "s32", "fp8": "f32"}[kind]
    assert not re.search(r"(bf16|f16|f32|s32)\[4096,2048\]", text), "a wide weight"
