"""Products with quantised weights: those with the weights that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, jitted

from kernels_pallas.grouped_matmul import grouped_matmul, quantised_tpu
from kernels_pallas.grouped_matmul import reference as grouped_reference
from kernels_pallas.linear import linear
from kernels_pallas.linear import reference as linear_reference
from kernels_pallas.quantised import Quantised

DTYPES = [jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float4_e2m1fn]


def quantised(*shape, dtype=jnp.int8, groups=None, zero=False):
    """A random weight [*lead, outputs, inputs]: with a scale per channel, and for each group if there are any."""
    random = np.random.default_rng(3)
    *lead, outputs, _ = shape
    integer = jnp.issubdtype(dtype, jnp.integer)
    values = random.integers(-8, 8, shape) if integer else 2 * random.normal(size=shape)
    return Quantised(
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


@pytest.mark.parametrize("form", FORMS)
def test_dequantise_equals_definition(form):
    weight = quantised(2, 5, 12, **form)
    assert_close(weight.dequantise(), by_definition(weight))


@pytest.mark.parametrize("form", FORMS)
def test_matrix_and_rows_are_of_the_same_weight(form):
    weight = quantised(2, 5, 12, **form)
    flat = by_definition(weight).reshape(10, 12)
    assert_close(weight.matrix().dequantise(), flat)
    assert_close(weight.matrix().take(jnp.asarray([7, 0, 99])).dequantise(), flat[[7, 0, 9]])
    stacked = quantised(3, 2, 5, 12, **form)
    assert_close(stacked.matrix(lead=1).dequantise(), by_definition(stacked).reshape(3, 10, 12))


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_interpreted"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@IMPLEMENTATIONS
def test_linear(form, dtype, implementation):
    if implementation != "xla" and form["groups"] is None:
        pytest.skip("the kernel is for groups only")
    weight, x = quantised(31, 48, **form), Draw().normal(5, 48, dtype=dtype)
    out = jitted(linear, implementation=implementation)(x, weight)
    assert out.dtype == dtype
    assert_close(out, linear_reference.linear(x, by_definition(weight)), dtype)


@pytest.mark.parametrize("form", FORMS)
@IMPLEMENTATIONS
def test_grouped(form, implementation):
    weight, x = quantised(5, 31, 48, **form), Draw().normal(40, 48)
    run = jitted(grouped_matmul, implementation=implementation)
    for sizes in ([3, 0, 20, 1, 16], [3, 0, 20, 1, 2], [0, 0, 0, 0, 0]):
        out = run(x, weight, np.asarray(sizes, np.int32))
        assert_close(out, grouped_reference.grouped_matmul(x, by_definition(weight), sizes))


@pytest.mark.parametrize("form", FORMS)
def test_kernel_with_the_outputs_last(form):
    # No whole lanes of inputs, but of outputs.
    weight, x = quantised(3, 256, 48, **form), Draw().normal(40, 48)
    sizes = np.asarray([3, 20, 1], np.int32)
    out = jitted(grouped_matmul, implementation="pallas_tpu_interpreted")(x, weight, sizes)
    assert_close(out, grouped_reference.grouped_matmul(x, by_definition(weight), sizes))


def test_kernel_takes_4_bit_floats_for_integers():
    weight, x = quantised(2, 31, 48, dtype=jnp.float4_e2m1fn, groups=3), Draw().normal(20, 48)
    sizes = np.asarray([12, 8], np.int32)
    out = jitted(quantised_tpu.grouped_matmul, codes=True, interpret=True)(x, weight, sizes)
    assert_close(out, grouped_reference.grouped_matmul(x, by_definition(weight), sizes))


@pytest.mark.parametrize("groups", [None, 8, 64])
def test_kernel_over_several_blocks(groups):
    weight, x = quantised(2, 600, 1024, groups=groups), Draw().normal(300, 1024)
    sizes = np.asarray([170, 90], np.int32)
    run = jitted(grouped_matmul, implementation="pallas_tpu_interpreted")
    assert_close(run(x, weight, sizes), jitted(grouped_matmul, implementation="xla")(x, weight, sizes))


def test_parts_that_do_not_fit_are_refused_by_name():
    good = quantised(2, 5, 12, groups=3, zero=True)
    good.check("w")
    for part, wrong in (("channel_scale", jnp.ones((5,))), ("group_scale", jnp.ones((2, 5, 5))), ("group_zero", 0)):
        values = {name: getattr(good, name) for name in ("values", "channel_scale", "group_scale", "group_zero")}
        with pytest.raises(ValueError, match=rf"w\.{part} has shape"):
            Quantised(**values | {part: jnp.asarray(wrong)}).check("w")


def test_a_weight_is_a_tree_of_its_arrays():
    weight = quantised(5, 12, groups=3)
    assert len(jax.tree.leaves(weight)) == 3
    doubled = jax.tree.map(lambda v: v, weight)
    assert_close(doubled.dequantise(), weight.dequantise())
