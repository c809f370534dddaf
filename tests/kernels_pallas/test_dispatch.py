"""Choosing an implementation, and the messages about shapes."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.shape_check import shapes_checked


def too_long(x):
    return f"{len(x)} is too long" if len(x) > 2 else None


FAST = dispatch.Implementation("fast", lambda x: ("fast", x), too_long)
SLOW = dispatch.Implementation("slow", lambda x: ("slow", x))


def test_a_named_choice_is_strict():
    assert dispatch.call("op", [FAST, SLOW], "slow", "ab") == ("slow", "ab")
    with pytest.raises(dispatch.UnsupportedError, match="op: fast cannot run this call: 3 is too long"):
        dispatch.call("op", [FAST, SLOW], "fast", "abc")
    with pytest.raises(dispatch.UnsupportedError, match="no implementation is called 'other'; there are: fast, slow"):
        dispatch.call("op", [FAST, SLOW], "other", "ab")


def test_the_automatic_choice_falls_back_and_reports_why(caplog):
    caplog.set_level(logging.INFO, "kernels_pallas")
    assert dispatch.call("op", [FAST, SLOW], None, "ab") == ("fast", "ab")
    assert not caplog.messages
    assert dispatch.call("op", [FAST, SLOW], None, "abc") == ("slow", "abc")
    assert caplog.messages == ["op uses slow (not fast: 3 is too long)"]
    with pytest.raises(dispatch.UnsupportedError, match=r"can run this call \(not fast: 3 is too long"):
        dispatch.call("op", [FAST], None, "abc")


def test_the_last_implementation_gives_the_derivatives():
    """Of those that have none, such as what C++ computes; integers and other arguments pass."""

    def by_bits(x, index, *, factor):
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32), jnp.float32)[index] * factor

    by_name = {"bits": by_bits, "plain": lambda x, i, *, factor: x[i] * factor}
    table = [dispatch.Implementation(name, call) for name, call in by_name.items()]

    def gradient(**how):
        table[0] = dataclasses.replace(table[0], **how)
        return jax.grad(lambda x: dispatch.call("op", table, None, x, jnp.array([0, 2]), factor=3.0).sum())(jnp.ones(3))

    assert gradient().tolist() == [3, 0, 3]
    assert gradient(own_derivative=True).tolist() == [0, 0, 0]


def array(*shape):
    return types.SimpleNamespace(shape=shape)


def test_shapes_are_written_once():
    """What a function's annotations say is what is checked."""

    @shapes_checked
    def operation(
        x: Float[Array, "*batch inputs"], y: Int[Array, " inputs"] | None, w: Float[Array, " inputs-1"] | None = None,
        *, scale: float = 1, z: Float[Array, "2"],
    ):  # fmt: skip
        return scale

    x, y, z = array(5, 4, 3), array(3), array(2)
    assert operation(x, None, z=z) == operation(x, y, array(2), z=z) == operation(array(3), y, z=z) == 1
    for call, message in [
        ((x, array(4)), r"operation: y has shape \(4,\), expected \[inputs\] with inputs = 3 \(by x\)"),
        ((x, array(3, 1)), r"operation: y has shape \(3, 1\), expected \[inputs\]"),
        ((x, y, array(3)), r"operation: w has shape \(3,\), expected \[inputs-1\] with inputs-1 = 2 \(by x\)"),
        ((array(), y), r"operation: x has shape \(\), expected \[\*batch, inputs\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            operation(*call, z=z)


def test_an_unknown_dimension_is_refused():
    with pytest.raises(KeyError, match="heds"):

        @shapes_checked
        def operation(x: Float[Array, "rows heds"]):
            pass


def on(platform, run=lambda x: ("kernel", x), unsupported=lambda x: None):
    return dispatch.Implementation("kernel", run, unsupported, platform)


def test_a_platform_gets_its_own_kernels():
    array = jnp.ones(3)
    kernels = [on("tpu", lambda x: x + 1), dispatch.Implementation("plain", lambda x: x - 1)]
    assert (dispatch.call("op", kernels, None, array) == 0).all()  # a CPU runs these tests
    choice = dispatch.KernelChoice(platform="tpu")
    with choice.applied():
        assert (dispatch.call("op", kernels, None, array) == 2).all()
    assert choice.report() == "kernels for tpu: op by kernel"
    hidden = [dataclasses.replace(kernels[0], automatic=False), kernels[1]]
    with dispatch.KernelChoice(platform="tpu").applied():
        assert (dispatch.call("op", hidden, None, array) == 0).all()


def test_types_of_numbers_are_no_arrays_when_a_kernel_is_tried():
    """`out_dtype` may be a type, which has a dtype of its own."""
    kernels = [on("tpu", lambda x, out_dtype: x.astype(out_dtype), lambda x, out_dtype: None)]
    with dispatch.KernelChoice(platform="tpu").applied():
        for dtype in (jnp.bfloat16, np.float32, jnp.dtype("float32")):
            assert dispatch.call("op", kernels, None, jnp.ones(2), out_dtype=dtype).dtype == dtype


def test_a_kernel_that_fails_to_compile_costs_a_warning(caplog):
    def refused(x):
        raise NotImplementedError("no such\n  instruction")

    kernels = [on("tpu", refused), dispatch.Implementation("plain", lambda x: x)]
    choice = dispatch.KernelChoice(platform="tpu")
    with choice.applied():
        for _ in range(3):
            dispatch.call("op", kernels, None, jnp.ones(2))
        with pytest.raises(NotImplementedError):
            dispatch.call("op", kernels, "kernel", jnp.ones(2))
    said = "op does not use kernel, which fails to compile: no such instruction"
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [said]  # once for all layers
    assert "op by kernel (named) and plain (not kernel: it fails to compile: no such instruction)" in choice.report()


def test_kernels_are_tried_on_the_device_compiled_for():
    # On a device that is at hand, kernels are compiled: here Pallas for TPU, which no CPU has.
    def kernel(x):
        return pl.pallas_call(lambda i, o: None, out_shape=x)(x)

    choice = dispatch.KernelChoice(platform="tpu", device=jax.devices()[0])
    with choice.applied():
        dispatch.call("op", [on("tpu", kernel), dispatch.Implementation("plain", lambda x: x)], None, jnp.ones(2))
    assert "not kernel: it fails to compile: Only interpret mode" in choice.report()


def test_names():
    assert dispatch.KernelChoice.parse("auto").named == dispatch.KernelChoice.parse("").named == {}
    kernels = [dispatch.Implementation("fast", lambda x: "fast"), dispatch.Implementation("slow", lambda x: "slow")]
    with dispatch.KernelChoice.parse("slow").applied():
        assert dispatch.call("op", kernels, None, 1) == "slow"
        assert dispatch.call("other", kernels[:1], None, 1) == "fast"  # has no `slow`
    choice = dispatch.KernelChoice.parse("op=slow, typo=fast")
    with choice.applied():
        assert dispatch.call("op", kernels, None, 1) == "slow"
        assert dispatch.call("op", kernels, "fast", 1) == "fast"
    assert choice.report().endswith("op by fast (named) and slow (named), named, but not in use: typo")
    with (
        dispatch.KernelChoice.parse("op=quick").applied(),
        pytest.raises(dispatch.UnsupportedError, match="called 'quick'"),
    ):
        dispatch.call("op", kernels, None, 1)
    with pytest.raises(dispatch.UnsupportedError, match="'b' is not operation=implementation"):
        dispatch.KernelChoice.parse("a=x,b")


def test_tells_how_products_with_bfloat16_weights_run(monkeypatch):
    monkeypatch.setattr(dispatch.native, "instructions", lambda: "avx2")
    monkeypatch.setattr(dispatch.native, "multiplies_bfloat16", lambda: False)
    line = dispatch.KernelChoice(platform="cpu").products()
    assert line == (
        "C++ products use the instruction set avx2 and widen bfloat16 weights to float32 for any number of rows "
        "(no bfloat16 instructions)"
    )
    monkeypatch.setattr(dispatch.native, "instructions", lambda: "avx512")
    monkeypatch.setattr(dispatch.native, "multiplies_bfloat16", lambda: True)
    assert "avx512" in dispatch.KernelChoice(platform="cpu").products()
    assert dispatch.KernelChoice(platform="cpu").products().endswith("XLA multiplies more than 8 rows in bfloat16")
    assert dispatch.KernelChoice(platform="tpu").products() is None
    monkeypatch.setattr(dispatch.native, "instructions", lambda: None)
    assert dispatch.KernelChoice(platform="cpu").products() is None
