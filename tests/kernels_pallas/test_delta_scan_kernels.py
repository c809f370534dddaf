"""The kernel of the scan by the gated delta rule, interpreted: against the definition, as every implementation.

That the TPU's compiler takes it is for test_tpu_compile_delta.py.
"""

import dataclasses

import pytest
from operation_checks import jitted
from test_delta_scan import SHAPES, Scan

from kernels_pallas.delta_scan import delta_scan, shapes

SMALL = dataclasses.replace(SHAPES[-1], name="4 heads, 2 groups", heads=4, groups=2, tile_size=16)


class TestTpu(Scan):
    implementation = "pallas_tpu_interpreted"
    odd = SMALL
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, scan, shape):
        super().test_equals_definition(scan, shape)

    @pytest.mark.parametrize("tile_size", [16, 128])
    def test_sizes(self, scan, tile_size):
        # 128: two blocks of tokens in a tile.
        super().test_equals_definition(scan, dataclasses.replace(self.odd, tile_size=tile_size))

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", shapes.SHAPES[:4], ids=lambda s: s.name)
    def test_real_sizes(self, scan, shape):
        super().test_equals_definition(scan, shape)

    def test_several_blocks_of_heads(self, monkeypatch):
        # Heads of 16 go in eights, and here in two blocks, each half a group.
        monkeypatch.setattr("kernels_pallas.delta_scan.pallas_tpu.BLOCK_BYTES", 16 * 16 * 128 * 4)
        shape = dataclasses.replace(SMALL, heads=32, groups=1, head_dim=16, state=128)
        scan = jitted.__wrapped__(delta_scan, implementation=self.implementation)
        super().test_equals_definition(scan, shape)
