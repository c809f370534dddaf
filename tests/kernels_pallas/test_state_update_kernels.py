"""The state update's kernels, interpreted: against the definition, as every implementation.

What the interpreter cannot show is checked elsewhere: that compilers take them (test_tpu_compile.py, test_gpu_lower.py)
and that they run (`pytest -m gpu`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, jitted
from test_state_update import ODD, SHAPES, Update, layer, states, where

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.state_update import reference, shapes, state_update

# Triton's blocks are powers of two.
EVEN = dataclasses.replace(ODD, name="9 heads of 16, 3 groups", head_dim=16, state=32)


class Kernel(Update):
    """Kernels promise less than other implementations: no row may write a slot that another row reads."""

    test_in_place = None  # the interpreter copies; compiled programs are looked at instead

    @pytest.mark.parametrize("step", [0, 1, 2])
    def test_a_row_may_write_the_slot_it_reads(self, update, step):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 3, 3), states(draw, self.odd, 8)
        write = np.array([[4, 5, 6], [0, 0, 0], [7, 0, 0]])
        write[0, step], write[1, step] = 1, 2
        places = where([1, 2, 0], write)
        y, after = update(*inputs, store, **places)
        want_y, want = reference.state_update(*inputs, store, **places)
        assert_close(y, want_y)
        assert_close(after[1:], want[1:])

    test_reads_come_before_writes = None

    def test_several_rows_may_read_one_slot(self, update):
        draw = Draw()
        inputs, store = layer(draw, self.odd, 3, 1), states(draw, self.odd, 6)
        places = where([2, 2, 2], [[3], [1], [4]])
        y, after = update(*inputs, store, **places)
        want_y, want = reference.state_update(*inputs, store, **places)
        assert_close(y, want_y)
        assert_close(after[1:], want[1:])

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, update, shape):
        if self.odd is EVEN:
            shape = dataclasses.replace(shape, head_dim=16, state=32)
        self.check(update, shape, np.float32)

    def test_sizes(self, update):
        self.check(update, self.odd, np.float32)

    @pytest.mark.parametrize("shape", [ODD])
    def test_bfloat16(self, update, shape):
        self.check(update, self.odd, jnp.bfloat16)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda s: s.name)
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
