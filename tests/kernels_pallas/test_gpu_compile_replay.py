"""The replay's kernel compiled by XLA's compiler for an H200 that is not at hand, at the sizes of real models."""

from functools import partial

import jax
import pytest
from real_shapes import BF16, F32, MODELS, OTHERS, gated_replay_call, gated_update_call, nbytes, replay_call
from test_gpu_compile_delta import gated_update_call as gated_delta_call
from test_gpu_lower import replay, replay_delta
from test_tpu_compile_delta import DIVIDED, KIMI, LARGE, NEXT, OLMO
from test_tpu_compile_delta import replay_call as delta_replay_call
from topology import compile_for_gpu, registers_of_kernels

from kernels_pallas.delta_replay import DeltaTail
from kernels_pallas.gated_delta_replay import gated_delta_replay
from kernels_pallas.gated_delta_update import Gates
from kernels_pallas.gated_replay import gated_replay
from kernels_pallas.state_replay import Tail
from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

CASES = [slow(MODELS[0], 64, 4, F32), (MODELS[2].divided(8), 8, 1, BF16)]
CASES += [slow(model, 128, steps, F32) for model in (*MODELS, *OTHERS) for steps in (1, 4)]


DELTA = [(KIMI, 64, 4, F32)]
DELTA += [slow(*c) for c in ((NEXT, 64, 4, F32), (LARGE, 64, 1, F32), (OLMO, 8, 4, F32))]
DELTA += [slow(m, rows, steps, F32) for m in DIVIDED for rows in (1, 64) for steps in (1, 4)]


def in_place(operation, call, folder, stores=(0, 1, 2, 3), temporaries=1 << 20):
    """Compiles a replay; returns registers and spilled bytes of its kernels."""

    def states_and_tails_first(*args):
        y, *rest = jax.tree.leaves(operation(*args))
        return *rest, y

    program = compile_for_gpu("h200", states_and_tails_first, *call, donate=stores, xla_dump_to=str(folder))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(nbytes(call[n]) for n in stores)
    assert memory.temp_size_in_bytes < temporaries
    return registers_of_kernels(folder)


@pytest.mark.parametrize(("model", "rows", "steps", "store"), CASES)
def test_state_replay(model, rows, steps, store, tmp_path):
    call = replay_call(model, rows, steps, 16, store=store)
    used, spilled = in_place(replay, call, tmp_path)["state_replay"]
    assert used <= (128 if steps == 1 else 240)
    if model.state <= 128:
        assert spilled == 0


@pytest.mark.smoke
@pytest.mark.parametrize(("model", "rows", "steps", "store"), DELTA)
def test_delta_replay(model, rows, steps, store, tmp_path):
    call = delta_replay_call(model, rows, steps, store=store)
    used, spilled = in_place(replay_delta, call, tmp_path)["delta_replay"]
    assert used <= (128 if steps == 1 else 255)
    assert spilled == 0


def between_anchors(operation, make, options, *args):
    """Calls `gated_replay` or `gated_delta_replay`; `make` makes the tail."""
    *inputs, store, one, two, three, windows, ring, other_windows, other_ring, places = args
    stores = store, make(one, two, three), windows, ring, other_windows, other_ring
    return operation(*inputs, *stores, **places, **options, interval=16, implementation="pallas_gpu")


GATED = [(MODELS[0], 64, 1), (MODELS[1], 8, 4)]
GATED += [slow(m, 64, steps) for m in (*MODELS[1:], *OTHERS) for steps in (1, 4)]


@pytest.mark.parametrize(("model", "rows", "steps"), GATED)
def test_gated_replay(model, rows, steps, tmp_path):
    *inputs, store, windows, windows_bc, _ = gated_update_call(model, rows, steps)
    tail = replay_call(model, rows, steps, 16)[1:4]
    call = gated_replay_call(inputs, store, (windows, windows_bc), tail, rows, steps)
    run = partial(between_anchors, gated_replay, Tail, {"eps": 1e-5, "dt_limit": (1e-3, float("inf"))})
    # The projections' outputs in one array, and y.
    most = 3 * (2 * nbytes(inputs[0]) + nbytes(inputs[1])) + (1 << 16)
    registers = in_place(run, call, tmp_path, tuple(range(11, 19)), most)
    used, spilled = registers["gated_replay"]
    assert used <= (128 if steps == 1 else 255)
    if model.state <= 128:
        assert spilled == 0
    assert registers["gated_norm"][1] <= 8


GATED_DELTA = [(NEXT, 64, 1), (KIMI, 64, 4)]
GATED_DELTA += [slow(m, 64, steps) for m in DIVIDED for steps in (1, 4)]


@pytest.mark.parametrize(("model", "rows", "steps"), GATED_DELTA)
def test_gated_delta_replay(model, rows, steps, tmp_path):
    *inputs, store, windows, windows_qk, _ = gated_delta_call(model, rows, steps)
    tail = delta_replay_call(model, rows, steps)[1:4]
    call = gated_replay_call(inputs, store, (windows, windows_qk), tail, rows, steps)
    gates = Gates(beta_scale=1.0, log_decay_bound=None, output="silu", eps=1e-6)
    run = partial(between_anchors, gated_delta_replay, DeltaTail, {"gates": gates})
    most = 1.1 * (2 * nbytes(inputs[0]) + 5 * nbytes(inputs[1]) + nbytes(inputs[3])) + 1e5
    registers = in_place(run, call, tmp_path, tuple(range(10, 18)), most)
    used, spilled = registers["gated_delta_replay"]
    assert used <= (128 if steps == 1 else 255)
    assert spilled == 0
    assert registers["gated_norm"][1] == 0
