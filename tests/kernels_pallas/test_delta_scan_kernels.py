"""The kernels of the scan by the gated delta rule, interpreted: against the definition, as every implementation.

That compilers take them is for test_tpu_compile_delta.py and test_gpu_compile_delta.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, jitted
from test_delta_scan import SHAPES, TOLERANCE, Scan, layer, states, where

from benchmarks.kernels.workloads import DELTA
from kernels_pallas.delta_scan import delta_scan
from kernels_pallas.dispatch import UnsupportedError
from tests.support.selection import slow

pytestmark = pytest.mark.full

SMALL = dataclasses.replace(SHAPES[-1], name="4 heads, 2 groups", heads=4, groups=2, tile_size=16)
# Keys in three pieces, tiles of three blocks.
EVEN = dataclasses.replace(SMALL, name="4 heads of 32, 2 groups", head_dim=32, state=48, tile_size=48)
EVEN_BY_CHANNEL = dataclasses.replace(EVEN, name="4 heads of 32, 2 groups, by channel", by_channel=True)
BY_CHANNEL = dataclasses.replace(SMALL, name="4 heads, 2 groups, by channel", by_channel=True)


class Kernel(Scan):
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, scan, shape):
        if self.odd is EVEN:
            even = {name: -(-getattr(shape, name) // 16) * 16 for name in ("head_dim", "state", "tile_size")}
            shape = dataclasses.replace(shape, **even)
        Scan.test_equals_definition(self, scan, shape)

    @pytest.mark.smoke
    @pytest.mark.parametrize("tile_size", [16, 128])
    def test_sizes(self, scan, tile_size):
        # 128: two blocks of tokens in a tile.
        Scan.test_equals_definition(self, scan, dataclasses.replace(self.odd, tile_size=tile_size))

    @pytest.mark.parametrize("dtype", [np.float32, slow(jnp.bfloat16)])
    def test_cutting_between_tiles_changes_no_bit(self, dtype):
        super().test_cutting_between_tiles_changes_no_bit(dtype)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", DELTA[:5], ids=lambda s: s.name)
    def test_real_sizes(self, scan, shape):
        Scan.test_equals_definition(self, scan, shape)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"
    odd = SMALL

    def test_several_blocks_of_heads(self, monkeypatch):
        # Heads of 16 go in eights, and here in two blocks, each half a group.
        monkeypatch.setattr("kernels_pallas.delta_scan.pallas_tpu.BLOCK_BYTES", 16 * 16 * 128 * 4)
        shape = dataclasses.replace(SMALL, heads=32, groups=1, head_dim=16, state=128)
        scan = jitted.__wrapped__(delta_scan, implementation=self.implementation)
        Scan.test_equals_definition(self, scan, shape)


class TestTpuByChannel(TestTpu):
    """Every channel of a key decays on its own."""

    odd, strongest = BY_CHANNEL, TOLERANCE
    test_equals_definition = test_real_sizes = None  # above, with all sizes
    test_several_blocks_of_heads = None

    @pytest.mark.smoke
    @pytest.mark.parametrize("tile_size", [20, 128])
    def test_sizes(self, scan, tile_size):
        # 20: no power of two; 128: two blocks of tokens in a tile.
        Scan.test_equals_definition(self, scan, dataclasses.replace(self.odd, tile_size=tile_size))


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"
    odd = EVEN

    def test_says_what_it_cannot_run(self, scan):
        draw, shape = Draw(), dataclasses.replace(self.odd, tile_size=36)
        call = (*layer(draw, shape, 1, shape.tile_size), states(draw, shape, 3))
        with pytest.raises(UnsupportedError, match="tiles have a size of 36, not a multiple of 16"):
            scan(*call, **where([1], [1], [2]))


class TestGpuByChannel(TestGpu):
    """Every channel of a key decays on its own."""

    odd = EVEN_BY_CHANNEL
    test_equals_definition = test_real_sizes = test_says_what_it_cannot_run = None  # above, with all sizes
