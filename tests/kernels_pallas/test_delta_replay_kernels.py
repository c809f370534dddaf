"""The kernels of the delta rule's replay, interpreted: against the definition, as every implementation.

What the interpreter cannot show is checked elsewhere: that compilers take them (test_tpu_compile_replay.py,
test_gpu_lower.py).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import jitted
from test_delta_replay import BY_CHANNEL, ODD, SHAPES, DeltaReplay

from kernels_pallas.delta_replay import delta_replay
from kernels_pallas.dispatch import UnsupportedError
from tests.support.selection import slow

pytestmark = pytest.mark.full


class Kernel(DeltaReplay):
    test_in_place = None  # the interpreter copies; compiled programs are looked at instead
    strongest = 2e-3

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [s for s in SHAPES if not s.by_channel], ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("steps", [3, slow(1)])
    def test_equals_snapshots(self, replay, steps):
        super().test_equals_snapshots(replay, steps)

    @pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
    def test_bfloat16(self, replay, store):
        self.check(replay, self.odd, self.rows_of(self.odd, 5), dtype=jnp.bfloat16, store=store, slots=11)

    @pytest.mark.smoke
    def test_sizes(self, replay):
        self.check(replay, self.odd, self.rows_of(self.odd, 5), slots=11)


class TestTpu(Kernel):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize("heads", [16, 48])
    def test_several_blocks_of_heads(self, heads, monkeypatch):
        # 16 heads: a block is half a group. 48: three blocks, of a group each.
        monkeypatch.setattr("kernels_pallas.delta_replay.pallas_tpu.BLOCK_BYTES", 8 * 16 * 128 * 4)
        shape = dataclasses.replace(
            self.odd, rows=6, heads=heads, groups=heads // 16, head_dim=16, state=128, interval=8
        )

        def run_anew(*args, interval, **kwargs):
            run = jitted.__wrapped__(delta_replay, implementation=self.implementation, interval=interval)
            return run(*args, **kwargs)

        self.check(run_anew, shape, self.rows_of(shape, 6), dtype=np.float32, slots=13)


class TestTpuByChannel(TestTpu):
    """Every channel of a key decays on its own."""

    odd, strongest = BY_CHANNEL, 5e-5
    test_equals_definition = None  # above


class TestGpu(Kernel):
    implementation = "pallas_gpu_interpreted"
    odd = dataclasses.replace(ODD, name="6 heads of 16, 3 groups", head_dim=16)

    def test_says_what_it_cannot_run(self, replay):
        small = dataclasses.replace(ODD, state=20)
        with pytest.raises(UnsupportedError, match="cannot run this call: keys have a size of 20, not a multiple of 8"):
            self.check(replay, small, self.rows_of(small, 2))


class TestGpuByChannel(TestGpu):
    """Every channel of a key decays on its own."""

    odd = dataclasses.replace(BY_CHANNEL, name="6 heads of 16, 3 groups, by channel", head_dim=16)
    strongest = 5e-5
    test_equals_definition = test_says_what_it_cannot_run = None  # above
