"""What lies between the projections of a gated delta net in decode from anchors, against its definition."""

import dataclasses

import numpy as np
import pytest
from test_gated_delta_update import SHAPES, layer, options
from test_gated_replay import Anchored

from kernels_pallas.delta_replay import DeltaTail
from kernels_pallas.gated_delta_replay import gated_delta_replay, reference
from tests.support.selection import some_slow

pytestmark = pytest.mark.full

PLAIN = dataclasses.replace(SHAPES[0], interval=8)


def tail(ring, draw, shape):
    decays = shape.heads * (shape.state if shape.by_channel else 1)
    logs = ring(16, decays, lambda n: -draw.positive(n, scale=0.3), np.float32)
    added = ring(16, shape.heads * shape.head_dim, draw.normal, np.float32)
    return DeltaTail(added, ring(16, shape.groups * shape.state), logs)


class GatedDeltaReplay(Anchored):
    operation, reference = staticmethod(gated_delta_replay), staticmethod(reference.gated_delta_replay)
    layer, tail, options = staticmethod(layer), staticmethod(tail), staticmethod(options)
    of_tokens, plain = 5, PLAIN

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, SHAPES[1], SHAPES[2]), ids=lambda s: s.name)
    def test_equals_definition(self, shape):
        self.check(dataclasses.replace(shape, interval=8))


class TestXla(GatedDeltaReplay):
    implementation = "xla"


class TestGpu(GatedDeltaReplay):
    implementation = "pallas_gpu_interpreted"

    def test_says_what_it_cannot_run(self):
        self.refuses(dataclasses.replace(PLAIN, state=20), "keys have a size of 20, not a multiple of 8")
