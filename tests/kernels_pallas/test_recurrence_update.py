"""The updates of recurrences against their definitions, and what holds for any implementation of them.

What the interpreter cannot show is checked elsewhere: that compilers take the kernels (test_tpu_compile.py,
test_gpu_compile.py) and that they run (`pytest -m gpu`).
"""

import dataclasses
import functools

import numpy as np
import pytest
import recurrence_cases as shared
from operation_checks import DTYPES, ELSEWHERE, Draw, assert_same_bits, ints

from kernels_pallas.places import Rows

pytestmark = pytest.mark.full

ALL = "native", "xla", ELSEWHERE, *shared.KERNELS
# Rows that continue and write the slot that they read after the first, second or third step; two that read one slot, of
# which one keeps nothing; a fresh one; one with two steps of padding, and one of padding only.
READ, WRITE = (
    ints([1, 2, 3, 4, 4, 0, 5, 6]),
    ints([[1, 7, 8], [9, 2, 10], [11, 12, 3], [13, 14, 15], [0, 0, 0], [16, 0, 17], [18, 19, 20], [0, 0, 21]]),
)
SLOTS = WRITE.max() + 2
updated = functools.partial(shared.program, "update")
check = functools.partial(shared.check_call, "update")


@pytest.mark.smoke
@DTYPES
@shared.cases(*ALL)
def test_equals_definition(implementation, shape, dtype):
    draw = Draw()
    tokens, store = shared.entry(draw, shape, *WRITE.shape, dtype=dtype), shared.states(draw, shape, SLOTS, dtype)
    shared.pad(tokens, 6, 1)
    shared.pad(tokens, 7, 0)
    y, after = check(updated(implementation, shape), shape, tokens, store, Rows(READ, WRITE), dtype=dtype)
    assert (y[7] == 0).all()
    assert (y[6, 1:] == 0).all()
    assert_same_bits(after[21], store[6])
    if implementation != "pallas_gpu_interpreted" or dtype != np.float32:
        # There XLA:CPU may compute a state twice, for its slot and for the next step, and contract a sum once.
        assert_same_bits(after[19], after[18])
        assert_same_bits(after[20], after[18])
    # Float32 sums may differ in their last bit, and then, rarely, round to the other neighbor in bfloat16. States that
    # are not rounded between the steps would differ nearly everywhere.
    _, want = shared.definition("update", shape)(tokens, store, Rows(READ, WRITE), **shared.how(Draw(1), shape))
    differs = ~np.isclose(after[1:].astype(np.float32), want[1:].astype(np.float32), rtol=1e-5, atol=1e-6)
    assert differs.mean() <= (0 if dtype == np.float32 else 1e-3)


@shared.sizes(*ALL)
def test_sizes(implementation, shape):
    draw, slots = Draw(), shape.rows * (shape.steps + 1) + 3
    places = draw.slots(slots, shape.rows, shape.steps + 1)
    tokens, store = shared.entry(draw, shape, shape.rows, shape.steps), shared.states(draw, shape, slots)
    check(updated(implementation, shape), shape, tokens, store, Rows(places[:, 0], places[:, 1:]))


@pytest.mark.parametrize("heads", [16, 48])
@pytest.mark.parametrize("erase", [False, True])
def test_several_blocks_of_heads_on_tpu(heads, erase, monkeypatch):
    # 16 heads: a block is half a group. 48: three blocks, of a group each.
    monkeypatch.setattr("kernels_pallas.recurrence.update.pallas_tpu.BLOCK_BYTES", 8 * 8 * 16 * 4)
    shape = dataclasses.replace(
        shared.SHAPES[1], rows=2, heads=heads, groups=heads // 16, head_dim=8, state=16, erase=erase
    )
    anew = updated(shared.KERNELS[0], shape, anew=True)
    draw = Draw()
    rows = Rows(ints([1, 0]), ints([[2, 3], [0, 4]]))
    check(anew, shape, shared.entry(draw, shape, 2, 2), shared.states(draw, shape, 5), rows)
