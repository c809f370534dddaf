"""The replay's kernel compiled by XLA's compiler for an H200 that is not at hand, at the sizes of real models."""

import jax
import pytest
from real_shapes import BF16, F32, MODELS, OTHERS, nbytes, replay_call
from test_gpu_lower import replay, replay_delta
from test_tpu_compile_delta import DIVIDED, KIMI, LARGE, NEXT, OLMO
from test_tpu_compile_delta import replay_call as delta_replay_call
from topology import compile_for_gpu, registers_of_kernels

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

slow = pytest.mark.slow
CASES = [(MODELS[0], 64, 4, F32), (MODELS[2].divided(8), 8, 1, BF16)]
CASES += [pytest.param(model, 128, steps, F32, marks=slow) for model in (*MODELS, *OTHERS) for steps in (1, 4)]


DELTA = [(NEXT, 64, 4, F32), (LARGE, 64, 1, F32), (OLMO, 8, 4, F32), (KIMI, 64, 4, F32)]
DELTA += [pytest.param(m, rows, steps, F32, marks=slow) for m in DIVIDED for rows in (1, 64) for steps in (1, 4)]


def in_place(operation, call, folder):
    """Compiles a replay; returns registers and spilled bytes of its kernels."""

    def states_and_tails_first(*args):
        y, *rest = jax.tree.leaves(operation(*args))
        return *rest, y

    program = compile_for_gpu(
        "h200", states_and_tails_first, *call, donate=(0, 1, 2, 3), xla_dump_to=str(folder)
    )  # fmt: skip
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(nbytes(v) for v in call[:4])
    assert memory.temp_size_in_bytes < 1 << 20
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
