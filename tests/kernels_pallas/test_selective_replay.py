"""The replay of the selective scan against its definition, by the tests of `state_replay`."""

import numpy as np
import pytest
from test_selective_scan import layer as tokens
from test_selective_scan import states
from test_state_replay import Replay

from benchmarks.kernels.workloads import SELECTIVE
from kernels_pallas.selective_scan import reference, selective_replay, selective_update
from kernels_pallas.state_replay import Tail

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in SELECTIVE]
ODD = next(s for s in SHAPES if s.name == "27 channels, states of 5")


def layer(draw, shape, rows, steps, dtype=np.float32):
    return tokens(draw, shape, rows, steps, dtype=dtype)


def tails(draw, shape, count, entries=None, dtype=np.float32):
    lead = (count, entries or shape.entries)
    return Tail(
        np.full((*lead, shape.inner), np.nan, dtype),
        np.full((*lead, shape.state), np.nan, dtype),
        np.full((*lead, shape.inner), np.nan, np.float32),
    )


class SelectiveReplay(Replay):
    operation = staticmethod(selective_replay)
    reference = staticmethod(reference.selective_replay)
    snapshots = staticmethod(selective_update)
    layer = staticmethod(layer)
    states = staticmethod(states)
    tails = staticmethod(tails)
    odd = ODD
    test_real_sizes = None

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("shape", [ODD], ids=lambda s: s.name)
    @pytest.mark.parametrize("store", ["float32", "bfloat16"])
    def test_bfloat16(self, replay, shape, store):
        super().test_bfloat16(replay, shape, np.dtype(store))

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", [ODD], ids=lambda s: s.name)
    @pytest.mark.parametrize(("rows", "dtype"), [(1, np.float32), (4, "bfloat16")])
    def test_in_place(self, shape, rows, dtype):
        super().test_in_place(shape, rows, np.dtype(dtype))


class TestXla(SelectiveReplay):
    implementation = "xla"


class TestXlaAllRows(SelectiveReplay):
    """The form for other platforms."""

    implementation = "xla_all_rows"
