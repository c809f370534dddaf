"""The gated delta rule's kernels compiled by XLA's compiler for an H200 that is not at hand, at sizes of real models.

A few with --full; all with --slow.
"""

import dataclasses

import pytest
from real_shapes import BF16, F32, nbytes
from test_gpu_compile import compiled
from test_gpu_lower import scan_delta, update_delta
from test_tpu_compile_delta import DIVIDED, KIMI, LARGE, NEXT, OLMO, STORE, scan_call, update_call

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

slow = pytest.mark.slow
ODD = dataclasses.replace(OLMO, name="3 groups of 2 heads, keys of 40", heads=6, groups=3, head_dim=24, state=40)


UPDATES = [(NEXT, 64, 1, F32), (LARGE, 64, 4, F32), (KIMI, 64, 4, F32), (ODD, 8, 4, F32)]
MORE = [(m, rows, steps, F32) for m in DIVIDED for rows in (1, 64, 256) for steps in (1, 4)]
MORE += [(m, 64, 4, BF16) for m in DIVIDED]


@pytest.mark.parametrize(
    ("model", "rows", "steps", "store"),
    [*UPDATES, *(pytest.param(*case, marks=slow) for case in MORE if case not in UPDATES)],
)
def test_delta_update(model, rows, steps, store, tmp_path):
    call = update_call(model, rows, steps, store=store)
    program, registers = compiled(tmp_path, update_delta, call, donate=STORE)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    assert memory.temp_size_in_bytes < 1 << 20
    used, spilled = registers["delta_update"]
    assert used <= 168
    assert spilled == 0


SCANS = [(NEXT, 16, 128, BF16, F32), (OLMO, 4, 64, BF16, BF16), (KIMI, 16, 128, BF16, F32)]
MORE_SCANS = [(model, tiles, 128, BF16, F32) for model in DIVIDED for tiles in (1, 16)]
MORE_SCANS += [(model, 16, 64, BF16, BF16) for model in DIVIDED] + [(NEXT, 16, 128, F32, F32)]


@pytest.mark.parametrize(
    ("model", "tiles", "tile_size", "dtype", "store"),
    [*SCANS, *(pytest.param(*case, marks=slow) for case in MORE_SCANS if case not in SCANS)],
)
def test_delta_scan(model, tiles, tile_size, dtype, store, tmp_path):
    call = scan_call(model, tiles, tile_size=tile_size, dtype=dtype, store=store)
    program, registers = compiled(tmp_path, scan_delta, call, donate=STORE)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    # Of 32 tokens and each head: a triangular system's solution, and scores in the inputs' dtype.
    between = tiles * tile_size * model.heads * 32 * (4 + call[0].dtype.itemsize)
    if model.by_channel:  # sums of log decays, and queries and keys decayed
        between += tiles * tile_size * model.heads * model.state * (4 + 3 * call[0].dtype.itemsize)
    assert memory.temp_size_in_bytes < between + 4e6
    for kernel in ("delta_scan_systems", "delta_scan_along_rows"):
        _, spilled = registers[kernel]
        assert spilled == 0
