"""What lies between a Mamba2 layer's projections in decode from anchors, against its definition."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_same_bits, jitted
from test_gated_update import layer, options
from test_state_replay import row, where

from benchmarks.kernels.workloads import GATED
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.gated_replay import gated_replay, reference
from kernels_pallas.state_replay import Tail
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

SHAPES = [dataclasses.replace(s.small(), interval=8) for s in GATED]
PLAIN = SHAPES[0]
STEPS, SLOTS, TAILS = 3, 14, 9
# Far behind an anchor, right after it, one token after it, fresh with and without a tail, across a boundary with and
# without a slot for its state, onto an anchor between boundaries with and without inputs since, and padding.
ROWS = [
    row(1, 1, 8, 14, 3, 8),
    row(2, 2, 8, 8, 2, 9),
    row(3, 3, 16, 17, 1, 0),
    row(0, 4, 0, 0, 3, 10),
    row(0, 5, 0, 2, 3, 11),
    row(4, 6, 8, 15, 3, 0),
    row(5, 7, 5, 7, 2, 5),
    row(6, 8, 7, 7, 3, 6),
    row(),
]


def tail(ring, draw, shape):
    inner, keys = shape.heads * shape.head_dim, shape.groups * shape.state
    steps = ring(16, shape.heads, lambda n: draw.positive(n, scale=0.3), np.float32)
    return Tail(ring(16, inner), ring(16, keys), steps)


def stores(draw, shape, places, tail, dtype, states, width):
    """Of each kind, with NaN in slot 0, in tail 0 and where no token since the anchor is."""
    inner, keys = shape.heads * shape.head_dim, shape.groups * shape.state

    def of_slots(*shape, dtype):
        found = draw.normal(SLOTS, *shape, dtype=dtype)
        found[0] = np.nan
        return found

    def ring(entries, channels, make=draw.normal, dtype=dtype):
        found = np.full((TAILS, entries, channels), np.nan, dtype)
        for which, first, last in zip(*(places[key] for key in ("tail_id", "anchor_length", "length")), strict=True):
            for n in range(max(first, last - entries + STEPS), last):
                found[which, n % entries] = make(channels).astype(dtype)
        return found

    state = of_slots(shape.heads, shape.head_dim, shape.state, dtype=states)
    convolutions = [v for n in (inner, 2 * keys) for v in (of_slots(width - 1, n, dtype=dtype), ring(8, n))]
    return state, tail(ring, draw, shape), *convolutions


class Anchored:
    """Every implementation of an operation between a layer's projections, and of its like in `test_gated_delta_replay`.

    The first inputs are those of tokens.
    """

    implementation: str
    operation, reference = staticmethod(gated_replay), staticmethod(reference.gated_replay)
    layer, tail, options = staticmethod(layer), staticmethod(tail), staticmethod(options)
    of_tokens, plain = 3, PLAIN

    def check(self, shape, dtype=np.float32, states=np.float32):
        draw, places = Draw(), where(ROWS)
        inputs = self.layer(draw, shape, len(ROWS), STEPS, dtype)
        before = stores(draw, shape, places, self.tail, dtype, states, getattr(shape, "width", 4))
        valid = np.arange(STEPS) < places["num_tokens"][:, None]
        for v in inputs[: self.of_tokens]:
            v[~valid] = np.nan
        options = {"interval": shape.interval, **self.options(shape)}
        y, *after = jitted(self.operation, implementation=self.implementation, **options)(*inputs, *before, **places)
        want_y, *want = self.reference(*inputs, *before, **options, **places)
        rounded = jnp.bfloat16 if jnp.bfloat16 in (dtype, states) else dtype
        assert y.dtype == dtype
        assert_close(y[valid], want_y[valid], dtype, None if dtype == jnp.bfloat16 else 1e-4)
        written = [8, 11, 5, 6]  # by the first row, by a fresh one, and over anchors
        assert_close(after[0][written], want[0][written], rounded)
        untouched = np.setdiff1d(np.arange(1, SLOTS), written)
        for new, old in ((after[n], before[n]) for n in (0, 2, 4)):
            assert_same_bits(new[untouched], old[untouched])
        for new, expected in zip(after[1], want[1], strict=True):
            assert_close(np.nan_to_num(new[1:]), np.nan_to_num(expected[1:]), rounded)
            assert_same_bits(np.isnan(new[1:]), np.isnan(expected[1:]))
        for n in range(2, 6):
            assert_same_bits(after[n][1:], want[n][1:])

    @pytest.mark.parametrize("states", some_slow([jnp.bfloat16, np.float32], np.float32), ids=["bfloat16", "float32"])
    def test_bfloat16(self, states):
        self.check(self.plain, jnp.bfloat16, states)

    def refuses(self, shape, reason):
        with pytest.raises(UnsupportedError, match=f"{self.implementation} cannot run this call: {reason}"):
            self.check(shape)


class GatedReplay(Anchored):
    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, SHAPES[1], SHAPES[3]), ids=lambda s: s.name)
    def test_equals_definition(self, shape):
        self.check(shape)

    @pytest.mark.slow
    def test_three_groups_of_odd_width(self):
        self.check(dataclasses.replace(PLAIN, heads=9, groups=3, head_dim=24))


class TestXla(GatedReplay):
    implementation = "xla"


class TestGpu(GatedReplay):
    implementation = "pallas_gpu_interpreted"

    def test_says_what_it_cannot_run(self):
        self.refuses(dataclasses.replace(PLAIN, state=40), "the state size is 40, not a power of two")
