"""What lies between a Mamba2 layer's projections in decode, against its definition, for any implementation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted

from benchmarks.kernels.workloads import GATED
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.gated_update import gated_update, reference
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in GATED]
PLAIN = SHAPES[0]
SLOTS = 14
# Rows that continue, are fresh, end before the last step, have no token, and write the slot that they read after the
# first step, with others after it.
PLACES = {
    "read_slot": np.array([1, 0, 2, 3, 4], np.int32),
    "write_slot": np.array([[5, 6, 7], [8, 0, 9], [10, 11, 0], [0, 0, 0], [4, 0, 12]], np.int32),
    "valid": np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool),
}


def layer(draw, shape, rows, steps, dtype=np.float32):
    inner, channels = shape.heads * shape.head_dim, 2 * shape.groups * shape.state

    def convolution(channels):
        bias = draw.normal(channels, dtype=dtype) if shape.bias else None
        return draw.normal(channels, shape.width, dtype=dtype), bias

    return (
        draw.normal(rows, steps, 2, inner, dtype=dtype),
        draw.normal(rows, steps, 2, shape.groups, shape.state, dtype=dtype),
        draw.normal(rows, steps, shape.heads, scale=2.0),
        draw.normal(shape.heads),
        draw.normal(shape.heads),
        draw.normal(shape.heads),
        *convolution(inner),
        *convolution(channels),
        draw.normal(inner, dtype=dtype) if shape.norm else None,
    )


def stores(draw, shape, dtype=np.float32, states=np.float32):
    found = (
        draw.normal(SLOTS, shape.heads, shape.head_dim, shape.state, dtype=states),
        draw.normal(SLOTS, shape.width - 1, shape.heads * shape.head_dim, dtype=dtype),
        draw.normal(SLOTS, shape.width - 1, 2 * shape.groups * shape.state, dtype=dtype),
    )
    for store in found:
        store[0] = np.nan
    return found


def options(shape):
    return {"eps": 1e-5, "dt_limit": (1e-3, 0.7), "norm_before_gate": shape.norm_before_gate}


class Between:
    """Every implementation of an operation between a layer's projections, and of its like in `test_gated_delta_update`.

    The first inputs are those of tokens, and the last three are the stores: states, windows of values, and windows that
    heads share.
    """

    implementation: str
    operation, reference = staticmethod(gated_update), staticmethod(reference.gated_update)
    layer, stores, options = staticmethod(layer), staticmethod(stores), staticmethod(options)
    of_tokens, plain = 3, PLAIN

    def run(self, shape, *arguments, **places):
        run = jitted(self.operation, implementation=self.implementation, **self.options(shape))
        return run(*arguments, **places)

    def check(self, shape, dtype=np.float32, states=np.float32):
        draw, valid = Draw(), PLACES["valid"]
        inputs, before = self.layer(draw, shape, 5, 3, dtype), self.stores(draw, shape, dtype, states)
        for v in inputs[: self.of_tokens]:
            v[~valid] = np.nan
        y, *after = self.run(shape, *inputs, *before, **PLACES)
        for v in inputs[: self.of_tokens]:
            v[~valid] = 0
        want_y, *want = self.reference(*inputs, *before, **self.options(shape), **PLACES)
        assert y.dtype == dtype
        assert_close(y[valid], want_y[valid], dtype, None if dtype == jnp.bfloat16 else 1e-4)
        assert_close(after[0][1:], want[0][1:], jnp.bfloat16 if jnp.bfloat16 in (dtype, states) else dtype)
        untouched = np.setdiff1d(np.arange(SLOTS), PLACES["write_slot"])
        assert_same_bits(after[0][untouched], before[0][untouched])
        for windows, expected in zip(after[1:], want[1:], strict=True):
            assert_same_bits(windows[1:], expected[1:])

    @pytest.mark.parametrize("states", some_slow([jnp.bfloat16, np.float32], np.float32), ids=["bfloat16", "float32"])
    def test_bfloat16(self, states):
        self.check(self.plain, jnp.bfloat16, states)

    def test_steps_in_one_call_equal_steps_in_several(self):
        draw = Draw()
        inputs, split = self.layer(draw, self.plain, 2, 3), self.stores(draw, self.plain)
        write, valid = np.array([[4, 5, 6], [7, 8, 9]], np.int32), np.ones((2, 3), bool)
        read = np.array([0, 2], np.int32)
        y, *after = self.run(self.plain, *inputs, *split, read_slot=read, write_slot=write, valid=valid)
        for t in range(3):
            one = [v[:, t : t + 1] for v in inputs[: self.of_tokens]]
            where = {"read_slot": read, "write_slot": write[:, t : t + 1], "valid": valid[:, :1]}
            part, *split = self.run(self.plain, *one, *inputs[self.of_tokens :], *split, **where)
            assert_close(part[:, 0], y[:, t], tolerance=1e-5)
            read = write[:, t]
        assert_close(split[0][1:], after[0][1:], tolerance=1e-6)
        for one, other in zip(split[1:], after[1:], strict=True):
            assert_same_bits(one[1:], other[1:])

    def test_in_place(self):
        if "interpreted" in self.implementation:
            pytest.skip("the interpreter copies; compiled programs are looked at instead")
        draw = Draw()
        inputs = self.layer(draw, self.plain, 2, 1)
        places = {name: value[:2, :1] if value.ndim > 1 else value[:2] for name, value in PLACES.items()}

        def run(stores, inputs, places):
            options = self.options(self.plain)
            y, *after = self.operation(*inputs, *stores, **places, **options, implementation=self.implementation)
            return tuple(after), y

        store = tuple(np.concatenate([v] * 8) for v in self.stores(draw, self.plain))
        assert_in_place(run, store, inputs, places)

    def refuses(self, shape, reason):
        draw = Draw()
        inputs, before = self.layer(draw, shape, 5, 3), self.stores(draw, shape)
        with pytest.raises(UnsupportedError, match=f"{self.implementation} cannot run this call: {reason}"):
            self.run(shape, *inputs, *before, **PLACES)


class GatedUpdate(Between):
    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, SHAPES[1], SHAPES[3]), ids=lambda s: s.name)
    def test_equals_definition(self, shape):
        self.check(shape)

    def test_three_groups_of_odd_width(self):
        self.check(dataclasses.replace(PLAIN, heads=9, groups=3, head_dim=24))


class TestXla(GatedUpdate):
    implementation = "xla"


class TestGpu(GatedUpdate):
    implementation = "pallas_gpu_interpreted"

    def test_says_what_it_cannot_run(self):
        self.refuses(dataclasses.replace(PLAIN, state=40), "the state size is 40, not a power of two")
