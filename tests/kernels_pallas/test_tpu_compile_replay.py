"""The replay's kernel compiled by the TPU's own compiler, at the sizes of real models: in place, and lean."""

import pytest
import test_tpu_compile_delta as delta
from real_shapes import BF16, F32, LIGHTNING, MODELS, OTHERS, nbytes, replay_call
from test_tpu_compile import DIVIDED, cases
from topology import SLICES, compile_for_tpu

from kernels_pallas.state_replay import Tail, state_replay
from tests.support.hlo_traffic import Traffic

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

DONATED = (0, 1, 2, 3)
NEMOTRON, NANO, BAMBA, _ = MODELS
FEW = [
    ("v5e", NEMOTRON, 64, 1, 16, F32),
    ("v5e", NEMOTRON, 128, 4, 16, F32),
    ("v6e", BAMBA.divided(4), 64, 4, 16, F32),
    ("tpu7x", NANO.divided(8), 8, 4, 8, BF16),
    ("v6e", LIGHTNING.divided(8), 64, 4, 16, F32),
]
ALL = [
    (name, model, rows, steps, interval, F32)
    for name in SLICES
    for model in DIVIDED
    for rows, steps, interval in ((1, 1, 16), (64, 1, 16), (128, 4, 16), (64, 4, 32), (8, 6, 64))
]
ALL += [(name, model, 64, 4, 16, BF16) for name in SLICES for model in DIVIDED]
ALL += [(name, model, 8, steps, 16, F32) for name in SLICES for model in OTHERS for steps in (1, 4)]

FEW_DELTA = [
    ("v5e", delta.NEXT, 64, 4, F32),
    ("v6e", delta.LARGE, 64, 4, F32),
    ("v6e", delta.LARGE.divided(8), 8, 1, F32),
]
FEW_DELTA += [("v5e", delta.KIMI, 64, 4, F32), ("v6e", delta.KIMI.divided(8), 64, 4, F32)]
FEW_DELTA += [("tpu7x", delta.NEXT.divided(8), 8, 1, BF16)]
ALL_DELTA = [
    (name, model, rows, steps, F32)
    for name in SLICES
    for model in delta.DIVIDED
    for rows in (1, 64)
    for steps in (1, 4)
]


def compiled(slice_name, call, interval):
    def run(states, x_tail, b_tail, dt_tail, *args):
        *inputs, anchor, tail_id, anchor_length, length, count, write = args
        places = {"anchor_slot": anchor, "tail_id": tail_id, "anchor_length": anchor_length, "length": length}
        y, states, tail = state_replay(
            states, Tail(x_tail, b_tail, dt_tail), *inputs, **places, num_tokens=count, write_slot=write,
            interval=interval, implementation="pallas_tpu",
        )  # fmt: skip
        return states, *tail, y

    return compile_for_tpu(slice_name, run, *call, donate=DONATED)


@pytest.mark.parametrize(("slice_name", "model", "rows", "steps", "interval", "store"), cases(FEW, ALL))
def test_state_replay(slice_name, model, rows, steps, interval, store):
    call = replay_call(model, rows, steps, interval, store=store)
    check(compiled(slice_name, call, interval), call, steps, interval)


@pytest.mark.smoke
@pytest.mark.parametrize(("slice_name", "model", "rows", "steps", "store"), cases(FEW_DELTA, ALL_DELTA))
def test_delta_replay(slice_name, model, rows, steps, store):
    call = delta.replay_call(model, rows, steps, store=store)
    program = compile_for_tpu(slice_name, delta.replay, *call, donate=DONATED)
    check(program, call, steps, delta.REPLAY_INTERVAL)


def check(program, call, steps, interval):
    """In place, without temporaries of the states' size, and with few bytes moved."""
    (rows,) = call[-1].shape
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(nbytes(call[i]) for i in DONATED)
    # Besides the kernel there is only what brings its inputs into its form.
    assert memory.temp_size_in_bytes <= max(4 * sum(nbytes(v) for v in call[4:]), 2 << 20)
    assert "tpu_custom_call" in program.as_text()
    if rows < 64:
        return
    # Bytes moved: states read once, and written once in an interval; what is valid of a tail, read; new tokens'.
    slot, tail = nbytes(call[0]) // call[0].shape[0], sum(nbytes(v) for v in call[1:4]) // call[1].shape[0]
    entries = call[1].shape[1]
    inputs = sum(nbytes(v) for v in (call[4], *call[4:-6]))
    states = rows * slot * (1 + steps / interval)
    least = states + rows * tail * (1 + steps / entries) + inputs
    assert Traffic(program.as_text()).total() <= 1.15 * least
    assert states <= rows * slot * (1.25 if steps == 1 else 1.4)
