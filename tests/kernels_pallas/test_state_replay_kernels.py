"""The replay's kernels, interpreted: against the definition, as every implementation.

What the interpreter cannot show is checked elsewhere: that compilers take them (test_tpu_compile_replay.py,
test_gpu_lower.py).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import jitted
from test_state_replay import ODD, SHAPES, Replay, row

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.state_replay import state_replay

pytestmark = pytest.mark.full

# Triton's blocks are powers of two.
EVEN = dataclasses.replace(ODD, name="9 heads of 16, 3 groups", head_dim=16, state=32)


class Kernel(Replay):
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead
    test_real_sizes = None

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        if self.odd is EVEN:
            shape = dataclasses.replace(shape, head_dim=16, state=32)
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("shape", [ODD])
    @pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
    def test_bfloat16(self, replay, shape, store):
        self.check(replay, self.odd, self.rows_of(self.odd, 5), dtype=jnp.bfloat16, store=store, slots=11)

    @pytest.mark.smoke
    def test_sizes(self, replay):
        self.check(replay, self.odd, self.rows_of(self.odd, 5), slots=11)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize("heads", [16, 48])
    def test_several_blocks_of_heads(self, heads, monkeypatch):
        # 16 heads: a block is half a group. 48: three blocks, of a group each.
        monkeypatch.setattr("kernels_pallas.state_replay.pallas_tpu.BLOCK_BYTES", 8 * 16 * 128 * 4)
        shape = dataclasses.replace(
            SHAPES[1], rows=6, heads=heads, groups=heads // 16, head_dim=16, state=128, interval=8
        )

        def run_anew(*args, interval, **kwargs):
            run = jitted.__wrapped__(state_replay, implementation=self.implementation, interval=interval)
            return run(*args, **kwargs)

        self.check(run_anew, shape, self.rows_of(shape, 6), dtype=np.float32, slots=13)


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"
    odd = EVEN

    def test_says_what_it_cannot_run(self, replay):
        with pytest.raises(UnsupportedError, match="pallas_gpu_interpreted cannot run this call: the state size is 40"):
            self.check(replay, ODD, [row(1, 1, 8, 9, 1, 2)])
