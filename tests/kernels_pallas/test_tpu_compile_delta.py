"""The gated delta rule's kernels compiled by the TPU's own compiler, at the sizes of real models."""

import dataclasses

import pytest
from real_shapes import BF16, F32, I32, nbytes, shape
from real_shapes import Model as AnyModel
from test_tpu_compile import cases, check_in_place
from topology import SLICES

from kernels_pallas.delta_replay import DeltaTail, delta_replay
from kernels_pallas.delta_scan import delta_scan
from kernels_pallas.delta_update import delta_update

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

STORE = 5
REPLAY_INTERVAL = 16


@dataclasses.dataclass(frozen=True)
class Model(AnyModel):
    """Also whether every channel of a key decays on its own."""

    by_channel: bool = False


NEXT, LARGE, OLMO, KIMI = MODELS = (
    Model("qwen3-next-80b-a3b", heads=32, head_dim=128, groups=16, state=128, q_heads=16, kv_heads=2),
    Model("qwen3.5-27b", heads=48, head_dim=128, groups=16, state=128, q_heads=24, kv_heads=4),
    Model("olmo-hybrid-7b", heads=30, head_dim=192, groups=30, state=96, q_heads=30, kv_heads=30),
    Model("kimi-linear-48b-a3b", heads=32, head_dim=128, groups=32, state=128, q_heads=32, kv_heads=1, by_channel=True),
)
DIVIDED = [NEXT, LARGE, OLMO, NEXT.divided(4), LARGE.divided(4), NEXT.divided(8), LARGE.divided(8), OLMO.divided(2)]
DIVIDED += [KIMI, KIMI.divided(8)]


def update(q, k, v, log_decay, beta, store, read, write):
    inputs = q, k, v, log_decay, beta, store
    return delta_update(*inputs, read_slot=read, write_slot=write, implementation="pallas_tpu")


def scan(q, k, v, log_decay, beta, store, first, read, write):
    places = {"tile_first": first, "read_slot": read, "write_slot": write}
    return delta_scan(q, k, v, log_decay, beta, store, **places, implementation="pallas_tpu")


def inputs(model, *lead, slots, dtype, store):
    keys = shape(*lead, model.groups, model.state, dtype=dtype)
    values, heads = shape(*lead, model.heads, model.head_dim, dtype=dtype), shape(*lead, model.heads)
    decays = shape(*lead, model.heads, model.state) if model.by_channel else heads
    return keys, keys, values, decays, heads, shape(slots, model.heads, model.head_dim, model.state, dtype=store)


def update_call(model, rows, steps, *, dtype=BF16, store=F32):
    given = inputs(model, rows, steps, slots=rows * (steps + 1) + 1, dtype=dtype, store=store)
    return *given, shape(rows, dtype=I32), shape(rows, steps, dtype=I32)


def scan_call(model, tiles, *, tile_size=128, dtype=BF16, store=F32):
    places = shape(tiles, dtype=bool), shape(tiles, dtype=I32), shape(tiles, dtype=I32)
    return *inputs(model, tiles, tile_size, slots=64, dtype=dtype, store=store), *places


def replay(states, u, k, log_decay, *args):
    """With the arrays of a tail apart; returns states and tail first."""
    *inputs, anchor, tail_id, anchor_length, length, count, write = args
    places = {"anchor_slot": anchor, "tail_id": tail_id, "anchor_length": anchor_length, "length": length}
    y, states, tail = delta_replay(
        states, DeltaTail(u, k, log_decay), *inputs, **places, num_tokens=count, write_slot=write,
        interval=REPLAY_INTERVAL, implementation="pallas_tpu",
    )  # fmt: skip
    return states, *tail, y


def replay_call(model, rows, steps, *, dtype=BF16, store=F32):
    """Arguments of `replay`, states and tail first."""
    *given, states = inputs(model, rows, steps, slots=2 * rows + 1, dtype=dtype, store=store)
    ring = rows + 1, 1 << (REPLAY_INTERVAL + steps - 2).bit_length()
    decays = model.heads * (model.state if model.by_channel else 1)
    tail = (
        shape(*ring, model.heads * model.head_dim),
        shape(*ring, model.groups * model.state, dtype=dtype),
        shape(*ring, decays),
    )
    return states, *tail, *given, *(shape(rows, dtype=I32) for _ in range(6))


FEW = [("v5e", NEXT, 64, 4, F32), ("v6e", LARGE.divided(8), 64, 4, F32), ("tpu7x", NEXT.divided(8), 8, 1, BF16)]
FEW += [("v6e", KIMI.divided(8), 64, 4, F32)]
ALL = [(name, m, rows, steps, F32) for name in SLICES for m in DIVIDED for rows in (1, 64, 256) for steps in (1, 4)]
ALL += [(name, m, 64, 4, BF16) for name in SLICES for m in DIVIDED]


@pytest.mark.parametrize(("slice_name", "model", "rows", "steps", "store"), cases(FEW, ALL))
def test_delta_update(slice_name, model, rows, steps, store):
    call = update_call(model, rows, steps, store=store)
    compiled = check_in_place(slice_name, update, call, store=STORE)
    # Bytes moved: the states, once in and once out for each step, and little else.
    slot = nbytes(call[STORE]) // call[STORE].shape[0]
    assert compiled.cost_analysis()["bytes accessed"] <= 1.1 * rows * (1 + steps) * slot + (1 << 21)


FEW_SCANS = [
    ("v5e", NEXT.divided(8), 16, 128, F32),
    ("v6e", LARGE.divided(8), 16, 64, F32),
    ("tpu7x", OLMO, 4, 128, F32),
    ("v6e", KIMI.divided(8), 16, 128, F32),
]
ALL_SCANS = [(name, model, tiles, 128, F32) for name in SLICES for model in DIVIDED for tiles in (1, 16)]
ALL_SCANS += [(name, model, 16, 64, BF16) for name in SLICES for model in DIVIDED]


@pytest.mark.smoke
@pytest.mark.parametrize(("slice_name", "model", "tiles", "tile_size", "store"), cases(FEW_SCANS, ALL_SCANS))
def test_delta_scan(slice_name, model, tiles, tile_size, store):
    check_in_place(slice_name, scan, scan_call(model, tiles, tile_size=tile_size, store=store), store=STORE)


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_float32_inputs(slice_name):
    check_in_place(slice_name, scan, scan_call(NEXT.divided(8), 4, dtype=F32), store=STORE)
    check_in_place(slice_name, update, update_call(NEXT, 8, 4, dtype=F32), store=STORE)
