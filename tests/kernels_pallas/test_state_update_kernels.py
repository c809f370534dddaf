"""The state update's kernels, interpreted: against the definition, as every implementation.

What the interpreter cannot show is checked elsewhere: that compilers take them (test_tpu_compile.py, test_gpu_lower.py)
and that they run (`pytest -m gpu`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, jitted
from test_state_update import ODD, SHAPES, Update, layer, states, where

from benchmarks.kernels.workloads import MAMBA2
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.state_update import state_update

pytestmark = pytest.mark.full

# Triton's blocks are powers of two.
EVEN = dataclasses.replace(ODD, name="9 heads of 16, 3 groups", head_dim=16, state=32)


class Kernel(Update):
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, update, shape):
        if self.odd is EVEN:
            shape = dataclasses.replace(shape, head_dim=16, state=32)
        self.check(update, shape, np.float32)

    @pytest.mark.smoke
    def test_sizes(self, update):
        self.check(update, self.odd, np.float32)

    @pytest.mark.parametrize("shape", [ODD])
    def test_bfloat16(self, update, shape):
        self.check(update, self.odd, jnp.bfloat16)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", MAMBA2, ids=lambda s: s.name)
    def test_real_sizes(self, update, shape):
        if self.odd is EVEN and shape.state == 40:
            pytest.skip("not a power of two")
        self.check(update, dataclasses.replace(shape, rows=min(shape.rows, 2)), np.float32)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize("heads", [16, 48])
    def test_several_blocks_of_heads(self, update, heads, monkeypatch):
        # 16 heads: a block is half a group. 48: three blocks, of a group each.
        monkeypatch.setattr("kernels_pallas.state_update.pallas_tpu.BLOCK_BYTES", 8 * 8 * 16 * 4)
        shape = dataclasses.replace(SHAPES[1], rows=2, heads=heads, groups=heads // 16, head_dim=8, state=16)
        self.check(lambda *args, **kwargs: run_anew(*args, **kwargs), shape, np.float32)


def run_anew(*args, **kwargs):
    return jitted.__wrapped__(state_update, implementation="pallas_tpu_interpreted")(*args, **kwargs)


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"
    odd = EVEN

    def test_says_what_it_cannot_run(self, update):
        draw = Draw()
        with pytest.raises(UnsupportedError, match="pallas_gpu_interpreted cannot run this call: the state size is 40"):
            update(*layer(draw, ODD, 1, 1), states(draw, ODD, 3), **where([1], [[2]]))
