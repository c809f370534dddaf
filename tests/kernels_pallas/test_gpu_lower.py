"""Triton kernels lowered for CUDA without a GPU: every operation in them exists there, and the store is one buffer.

That ptxas takes them, and that they are right on a GPU, is for `pytest -m gpu` and benchmarks/gpu_check.
"""

import jax.numpy as jnp
import pytest
from real_shapes import BF16, F32, MODELS, OTHERS, replay_call, scan_call, update_call
from test_tpu_compile_delta import MODELS as DELTA_MODELS
from test_tpu_compile_delta import STORE as DELTA_STORE
from test_tpu_compile_delta import replay_call as delta_replay_call
from test_tpu_compile_delta import scan_call as delta_scan_call
from test_tpu_compile_delta import update_call as delta_update_call
from topology import lower_for_gpu

from kernels_pallas.delta_replay import DeltaTail, delta_replay
from kernels_pallas.delta_scan import delta_scan
from kernels_pallas.delta_update import delta_update
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_replay import Tail, state_replay
from kernels_pallas.state_update import state_update
from tests.support.selection import slow

pytestmark = pytest.mark.full

STORE = 6
ALL = [*MODELS[:3], MODELS[0].divided(8), *OTHERS]


def update(*args):
    *inputs, read, write = args
    return state_update(*inputs, read_slot=read, write_slot=write, implementation="pallas_gpu")


def scan(x, dt, a, b, c, d, store, first, read, write):
    return ssd_scan(
        x, dt, a, b, c, d, store, tile_first=first, read_slot=read, write_slot=write, implementation="pallas_gpu"
    )


def update_delta(*args):
    *inputs, read, write = args
    return delta_update(*inputs, read_slot=read, write_slot=write, implementation="pallas_gpu")


def scan_delta(*args):
    *inputs, first, read, write = args
    places = {"tile_first": first, "read_slot": read, "write_slot": write}
    return delta_scan(*inputs, **places, implementation="pallas_gpu")


def replay(states, x_tail, b_tail, dt_tail, *args):
    *inputs, anchor, tail_id, anchor_length, length, count, write = args
    places = {"anchor_slot": anchor, "tail_id": tail_id, "anchor_length": anchor_length, "length": length}
    return state_replay(
        states, Tail(x_tail, b_tail, dt_tail), *inputs, **places, num_tokens=count, write_slot=write, interval=16,
        implementation="pallas_gpu",
    )  # fmt: skip


def replay_delta(states, u, k, log_decay, *args):
    *inputs, anchor, tail_id, anchor_length, length, count, write = args
    places = {"anchor_slot": anchor, "tail_id": tail_id, "anchor_length": anchor_length, "length": length}
    return delta_replay(
        states, DeltaTail(u, k, log_decay), *inputs, **places, num_tokens=count, write_slot=write, interval=16,
        implementation="pallas_gpu",
    )  # fmt: skip


def check(operation, call, donate=STORE):
    text = lower_for_gpu(operation, *call, donate=donate)
    assert "__gpu$xla.gpu.triton" in text or "triton_kernel_call" in text
    assert "output_operand_alias" in text


def cases(models):
    """Each model with the usual types, and the first also with the others."""
    usual, *others = (BF16, F32), (BF16, BF16), (jnp.float32, F32)
    found = [*((model, *usual) for model in models), *((models[0], *types) for types in others)]
    found += [slow(model, *types) for model in models[1:] for types in others]
    return pytest.mark.parametrize(("model", "dtype", "store"), found, ids=lambda one: getattr(one, "name", None))


@pytest.mark.smoke
@cases(ALL)
def test_kernels_lower(model, dtype, store):
    check(update, update_call(model, 64, 4, dtype=dtype, store=store))
    check(scan, scan_call(model, 16, dtype=dtype, store=store))
    check(replay, replay_call(model, 64, 4, 16, dtype=dtype, store=store), donate=(0, 1, 2, 3))


@pytest.mark.smoke
@cases(DELTA_MODELS)
def test_kernels_of_the_delta_rule_lower(model, dtype, store):
    check(update_delta, delta_update_call(model, 64, 4, dtype=dtype, store=store), donate=DELTA_STORE)
    check(replay_delta, delta_replay_call(model, 64, 4, dtype=dtype, store=store), donate=(0, 1, 2, 3))
    check(scan_delta, delta_scan_call(model, 16, dtype=dtype, store=store), donate=DELTA_STORE)


@pytest.mark.parametrize(("rows", "steps", "tile_size"), [(1, 1, 16), (256, 1, 256)])
def test_other_batches(rows, steps, tile_size):
    check(update, update_call(MODELS[0], rows, steps))
    check(replay, replay_call(MODELS[0], rows, steps, 16), donate=(0, 1, 2, 3))
    check(scan, scan_call(MODELS[0], max(1, rows // 16), tile_size=tile_size))
