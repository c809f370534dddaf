"""The selective scan's kernels compiled by XLA's compiler for an H200 that is not at hand, at sizes of real models."""

import pytest
from real_shapes import BF16, F32, nbytes
from test_gpu_compile import compiled
from test_selective_compile import INNER, STATE, STORE, scan, scan_call, update, update_call

from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

CASES = [(INNER, F32), (INNER // 8, F32), *(slow(*c) for c in ((INNER, BF16), (5120, F32)))]


@pytest.mark.parametrize(("inner", "store"), CASES)
@pytest.mark.parametrize("steps", [1, 4])
def test_update(inner, store, steps, tmp_path):
    call = update_call(inner, 64, steps, store=store)
    program, registers = compiled(tmp_path, on_gpu(update), call, donate=STORE)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    assert memory.temp_size_in_bytes < 1 << 20
    used, spilled = registers["selective_update"]
    assert used <= 96
    assert spilled == 0


@pytest.mark.parametrize(("inner", "store"), CASES)
def test_scan(inner, store, tmp_path):
    tiles = 16
    call = scan_call(inner, tiles, store=store)
    program, registers = compiled(tmp_path, on_gpu(scan), call, donate=STORE)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    # A state, and a sum of step sizes, for each tile.
    assert memory.temp_size_in_bytes < tiles * (STATE + 1) * inner * 4 + (1 << 20)
    for kernel in ("selective_scan_added", "selective_scan_passed_on", "selective_scan_outputs"):
        used, spilled = registers[kernel]
        assert used <= 128
        assert spilled == 0


def on_gpu(operation):
    return lambda *call: operation(*call, implementation="pallas_gpu")
