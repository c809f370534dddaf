"""The gated delta rule's kernels compiled by XLA's compiler for an H200 that is not at hand, at sizes of real models.

A few with --full; all with --slow.
"""

import dataclasses
import functools

import pytest
from real_shapes import BF16, F32, nbytes, shape, slots_of_steps
from test_gpu_compile import compiled
from test_gpu_lower import scan_delta, update_delta
from test_tpu_compile_delta import DIVIDED, KIMI, LARGE, NEXT, OLMO, STORE, scan_call, update_call

from kernels_pallas.gated_delta_update import Gates, gated_delta_update
from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

ODD = dataclasses.replace(OLMO, name="3 groups of 2 heads, keys of 40", heads=6, groups=3, head_dim=24, state=40)


UPDATES = [(NEXT, 64, 1, F32), (KIMI, 64, 4, F32)]
MORE = [(LARGE, 64, 4, F32), (ODD, 8, 4, F32)]
MORE += [(m, rows, steps, F32) for m in DIVIDED for rows in (1, 64, 256) for steps in (1, 4)]
MORE += [(m, 64, 4, BF16) for m in DIVIDED]


@pytest.mark.parametrize(
    ("model", "rows", "steps", "store"),
    [*UPDATES, *(slow(*case) for case in MORE if case not in UPDATES)],
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


def between_projections(*args):
    *inputs, places = args
    gates = Gates(beta_scale=1.0, log_decay_bound=None, output="silu", eps=1e-6)
    return gated_delta_update(*inputs, **places, gates=gates, implementation="pallas_gpu")


def gated_update_call(model, rows, steps, *, width=4):
    """Arguments of `gated_delta_update`, the three stores from the eleventh on, then its places."""
    inner, channels, lead = model.heads * model.head_dim, 2 * model.groups * model.state, (rows, steps)
    decays, slots = model.heads * (model.state if model.by_channel else 1), rows * (steps + 1) + 1
    bf16 = functools.partial(shape, dtype=BF16)
    return (
        bf16(*lead, 2, model.groups, model.state),
        bf16(*lead, inner),
        bf16(*lead, inner),
        shape(*lead, decays),
        shape(*lead, model.heads),
        shape(model.heads),
        shape(decays),
        bf16(inner, width),
        bf16(channels, width),
        bf16(model.head_dim),
        shape(slots, model.heads, model.head_dim, model.state),
        bf16(slots, width - 1, inner),
        bf16(slots, width - 1, channels),
        slots_of_steps(*lead),
    )


@pytest.mark.parametrize(
    ("model", "rows", "steps"),
    [(NEXT, 64, 1), (KIMI, 64, 4), (OLMO, 8, 1)] + [slow(m, 64, steps) for m in DIVIDED for steps in (1, 4)],
)
def test_gated_delta_update(model, rows, steps, tmp_path):
    call, stores = gated_update_call(model, rows, steps), (10, 11, 12)
    program, registers = compiled(tmp_path, between_projections, call, donate=stores)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(nbytes(call[n]) for n in stores)
    # The projections' outputs in one array, and y.
    assert memory.temp_size_in_bytes < 1.1 * (2 * nbytes(call[0]) + 5 * nbytes(call[1]) + nbytes(call[3])) + 1e5
    for kernel in ("gated_delta_update", "gated_norm"):
        used, spilled = registers[kernel]
        assert used <= 168
        assert spilled == 0


SCANS = [(NEXT, 16, 128, BF16, F32), (OLMO, 4, 64, BF16, BF16), (KIMI, 16, 128, BF16, F32)]
MORE_SCANS = [(model, tiles, 128, BF16, F32) for model in DIVIDED for tiles in (1, 16)]
MORE_SCANS += [(model, 16, 64, BF16, BF16) for model in DIVIDED] + [(NEXT, 16, 128, F32, F32)]


@pytest.mark.parametrize(
    ("model", "tiles", "tile_size", "dtype", "store"),
    [*SCANS, *(slow(*case) for case in MORE_SCANS if case not in SCANS)],
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
