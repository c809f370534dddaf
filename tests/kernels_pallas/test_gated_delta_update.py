"""What lies between the projections of a gated delta net in decode, against its definition."""

import dataclasses

import numpy as np
import pytest
from test_gated_update import SLOTS, Between

from benchmarks.kernels.workloads import DELTA
from kernels_pallas.gated_delta_update import Gates, gated_delta_update, reference
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

# A few heads of each kind of grouping, with keys in one piece and in two.
SHAPES = [
    dataclasses.replace(s, heads=2 * s.heads // s.groups, groups=2, head_dim=16, state=24 if s.state % 64 else 16)
    for s in DELTA[1:5]
]
PLAIN = SHAPES[0]
WIDTH = 4


def layer(draw, shape, rows, steps, dtype=np.float32):
    inner, channels = shape.heads * shape.head_dim, 2 * shape.groups * shape.state
    decays = shape.heads * (shape.state if shape.by_channel else 1)
    return (
        draw.normal(rows, steps, 2, shape.groups, shape.state, dtype=dtype),
        draw.normal(rows, steps, inner, dtype=dtype),
        draw.normal(rows, steps, inner, dtype=dtype),
        draw.normal(rows, steps, decays),
        draw.normal(rows, steps, shape.heads),
        draw.normal(shape.heads),
        draw.normal(decays),
        draw.normal(inner, WIDTH, dtype=dtype),
        draw.normal(channels, WIDTH, dtype=dtype),
        draw.normal(shape.head_dim, dtype=dtype),
    )


def stores(draw, shape, dtype=np.float32, states=np.float32):
    found = (
        draw.normal(SLOTS, shape.heads, shape.head_dim, shape.state, dtype=states),
        draw.normal(SLOTS, WIDTH - 1, shape.heads * shape.head_dim, dtype=dtype),
        draw.normal(SLOTS, WIDTH - 1, 2 * shape.groups * shape.state, dtype=dtype),
    )
    for store in found:
        store[0] = np.nan
    return found


def options(shape):
    if shape.by_channel:
        return {"gates": Gates(beta_scale=1.0, log_decay_bound=-5.0, output="sigmoid", eps=1e-5)}
    return {"gates": Gates(beta_scale=2.0, log_decay_bound=None, output="silu", eps=1e-6)}


class GatedDeltaUpdate(Between):
    operation, reference = staticmethod(gated_delta_update), staticmethod(reference.gated_delta_update)
    layer, stores, options = staticmethod(layer), staticmethod(stores), staticmethod(options)
    of_tokens, plain = 5, PLAIN

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, SHAPES[1], SHAPES[2]), ids=lambda s: s.name)
    def test_equals_definition(self, shape):
        self.check(shape)


class TestXla(GatedDeltaUpdate):
    implementation = "xla"


class TestGpu(GatedDeltaUpdate):
    implementation = "pallas_gpu_interpreted"

    def test_says_what_it_cannot_run(self):
        self.refuses(dataclasses.replace(PLAIN, state=20), "keys have a size of 20, not a multiple of 8")
