"""Products whose inputs are rounded to the weight's own 8 bits: their definition, and what accelerators compile."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_calls import BF16, F32, shape
from operation_checks import DTYPES, Draw, assert_close, jitted
from topology import compile_for_gpu, compile_for_tpu

from kernels_pallas.dispatch import KernelChoice, UnsupportedError
from kernels_pallas.linear import linear, narrow_inputs
from kernels_pallas.quantized import Quantized

pytestmark = pytest.mark.full

KINDS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SCALE = np.float32(0.017)


def weight_of(kind, outputs=31, inputs=48):
    random = np.random.default_rng(3)
    values = (
        random.integers(-128, 128, (outputs, inputs)) if kind == "int8" else 50 * random.normal(size=(outputs, inputs))
    )
    channels = jnp.asarray(0.1 * random.random(outputs) + 0.05, jnp.float32)
    scales = jnp.full(outputs, SCALE).at[: outputs // 2].set(SCALE / 2)  # two weights were joined
    return Quantized(jnp.asarray(values).astype(KINDS[kind]), channels, input_scale=scales)


def by_definition(x, weight):
    """In float64, element by element rounded by ml_dtypes' own conversions."""
    x = np.asarray(x, np.float32) / SCALE
    if weight.values.dtype == jnp.int8:
        q = np.clip(np.rint(x), -128, 127)
    else:
        q = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = np.asarray(weight.values).astype(np.float64)
    return q @ values.T * SCALE * np.asarray(weight.channel_scale).astype(np.float64)


@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_equals_definition(kind, dtype):
    weight, x = weight_of(kind), Draw().normal(5, 48, dtype=dtype) * 3
    out = jitted(linear, implementation="narrow_inputs")(x, weight)
    assert out.dtype == x.dtype
    assert_close(out, by_definition(x, weight), dtype)


def test_a_cpu_widens_unless_told_otherwise():
    choice = KernelChoice(platform="cpu")
    with choice.applied():
        linear(jnp.ones((2, 48)), weight_of("int8"))
    assert "narrow_inputs" not in choice.chosen["quantized_linear"]


@pytest.mark.parametrize("without", ["input_scale", "values"])
def test_what_has_no_such_form_is_refused(without):
    weight = weight_of("int8")
    changed = {"input_scale": None, "values": weight.values.astype(jnp.int4)}[without]
    weight = dataclasses.replace(weight, **{without: changed})
    with pytest.raises(UnsupportedError, match="no scale for its inputs" if without == "input_scale" else "int4"):
        linear(jnp.ones((2, 48)), weight, implementation="narrow_inputs")


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
    (product,) = re.finditer(r"= (\w+)\[[\d,]*\]\S* (?:dot|convolution)\(%([\w.-]+), %([\w.-]+)\)", text)
    operands = [
        re.findall(rf"%{re.escape(name)} = (\w+)\[", text[: product.start()])[-1] for name in product.groups()[1:]
    ]
    assert operands == [{"int8": "s8", "fp8": "f8e4m3fn"}[kind]] * 2
    assert product[1] == {"int8": "s32", "fp8": "f32"}[kind]
    assert not re.search(r"(bf16|f16|f32|s32)\[4096,2048\]", text), "a wide weight"
