"""The scan's kernels, interpreted: against the definition, as every implementation.

What the interpreter cannot show is checked elsewhere: that compilers take them (test_tpu_compile.py, test_gpu_lower.py)
and that they run (`pytest -m gpu`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_same_bits, jitted
from test_ssd_scan import SHAPES, Scan, layer, pad, states, where

from benchmarks.kernels.workloads import MAMBA2
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.ssd_scan import reference, ssd_scan

pytestmark = pytest.mark.full

SMALL = dataclasses.replace(SHAPES[-1], name="3 heads, 3 groups", heads=3, groups=3, tile_size=16)
EVEN = dataclasses.replace(SMALL, name="4 heads of 16, 2 groups", heads=4, groups=2, head_dim=16, tile_size=32)


class Kernel(Scan):
    odd = SMALL
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, scan, shape):
        if self.odd is EVEN:
            shape = dataclasses.replace(shape, head_dim=16, state=32, tile_size=-(-shape.tile_size // 16) * 16)
        super().test_equals_definition(scan, shape)

    @pytest.mark.smoke
    def test_sizes(self, scan):
        super().test_equals_definition(scan, self.odd)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", MAMBA2[:5], ids=lambda s: s.name)
    def test_real_sizes(self, scan, shape):
        super().test_equals_definition(scan, shape)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize(("heads", "groups", "head_dim"), [(4, 2, 64), (32, 1, 16)])
    def test_several_heads_in_a_register(self, heads, groups, head_dim, monkeypatch):
        # Heads of 64 go in pairs. Heads of 16 go in eights, and here in two blocks, each half a group.
        monkeypatch.setattr("kernels_pallas.ssd_scan.pallas_tpu.BLOCK_BYTES", 16 * 16 * 128 * 4)
        shape = dataclasses.replace(SMALL, heads=heads, groups=groups, head_dim=head_dim, state=128)
        scan = jitted.__wrapped__(ssd_scan, implementation=self.implementation)
        super().test_equals_definition(scan, shape)


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"
    odd = EVEN

    def test_tiles_of_several_blocks(self, scan):
        shape = dataclasses.replace(self.odd, tile_size=128)
        draw = Draw()
        inputs, store = layer(draw, shape, 2, 128, dtype=jnp.bfloat16), states(draw, shape, 4)
        pad(inputs, 1, 70)
        places = where([1, 0], [2, 0], [0, 3])
        y, after = scan(*inputs, store, **places)
        want_y, want = reference.ssd_scan(*inputs, store, **places)
        assert_close(y, want_y, jnp.bfloat16)
        assert_close(after[3], want[3], jnp.bfloat16)
        assert_same_bits(after[1:3], store[1:3])

    def test_says_what_it_cannot_run(self, scan):
        shape, draw = dataclasses.replace(self.odd, tile_size=36), Draw()
        call = (*layer(draw, shape, 1, 36), states(draw, shape, 3))
        with pytest.raises(UnsupportedError, match="tiles have a size of 36, not a multiple of 16"):
            scan(*call, **where([1], [1], [2]))


def test_a_first_tile_that_continues_nothing_starts_from_zeros():
    draw = Draw()
    inputs, store = layer(draw, EVEN, 2, EVEN.tile_size), states(draw, EVEN, 4)
    places = where([0, 0], [2, 0], [1, 3])
    want_y, want = reference.ssd_scan(*inputs, store, **places)
    for implementation in ("xla", "pallas_tpu_interpreted", "pallas_gpu_interpreted"):
        y, after = jitted(ssd_scan, implementation=implementation)(*inputs, store, **places)
        assert_close(y, want_y, tolerance=1e-4)
        assert_close(after[1:], want[1:], np.float32)
