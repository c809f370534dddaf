"""The selective scan compiled by the TPU's own compiler: in place, and with bounded temporaries.

At the sizes of Falcon-Mamba-7B and Jamba-1.5-Mini, whole and divided over 8 devices; with --slow, of Mamba-2.8B too.
"""

import jax.numpy as jnp
import pytest
from real_shapes import BF16, F32, nbytes, shape
from test_tpu_compile import check_in_place
from topology import SLICES, compile_for_tpu

from kernels_pallas.selective_scan import selective_replay, selective_scan, selective_update
from kernels_pallas.state_replay import Tail
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

INNER, STATE, STORE = 8192, 16, 6
PLACES = ("anchor_slot", "tail_id", "anchor_length", "length", "num_tokens", "write_slot")
ALL_STATES = 2048 * STATE * INNER * 4
"""Bytes of the states after each of 2,048 tokens."""


def inputs(*lead, inner=INNER):
    """x, dt, a, b, c and d of Falcon-Mamba-7B and Jamba-1.5-Mini."""
    x, dt = shape(*lead, inner, dtype=BF16), shape(*lead, inner, dtype=F32)
    b = c = shape(*lead, STATE, dtype=BF16)
    return x, dt, shape(STATE, inner, dtype=F32), b, c, shape(inner, dtype=F32)


def scan_call(inner, tiles, *, tile_size=128, store=F32):
    """Arguments of `scan`; the store is the seventh."""
    index, first = shape(tiles, dtype=jnp.int32), shape(tiles, dtype=bool)
    return *inputs(tiles, tile_size, inner=inner), shape(200, STATE, inner, dtype=store), first, index, index


def update_call(inner, rows, steps, *, store=F32):
    """Arguments of `update`; the store is the seventh."""
    index = shape(rows, dtype=jnp.int32), shape(rows, steps, dtype=jnp.int32)
    return *inputs(rows, steps, inner=inner), shape(2000, STATE, inner, dtype=store), *index


def scan(*args, implementation="pallas_tpu"):
    *inputs, first, read, write = args
    places = {"tile_first": first, "read_slot": read, "write_slot": write}
    return selective_scan(*inputs, **places, implementation=implementation)


def update(*args, implementation="pallas_tpu"):
    *inputs, read, write = args
    return selective_update(*inputs, read_slot=read, write_slot=write, implementation=implementation)


SOME = [("v5e", INNER), ("v6e", INNER), ("v5e", INNER // 8), ("v6e", INNER // 8)]
ALL = [(name, inner) for name in SLICES for inner in (INNER, INNER // 8, 5120, 640)]
CASES = pytest.mark.parametrize(("slice_name", "inner"), [*SOME, *(slow(*case) for case in ALL if case not in SOME)])
STORES = pytest.mark.parametrize("store", [F32, slow(BF16)], ids=["float32", "bfloat16"])


@CASES
@STORES
@pytest.mark.parametrize("tile_size", [128, slow(16), slow(512)])
def test_scan_kernel(slice_name, inner, store, tile_size):
    compiled = check_in_place(slice_name, scan, scan_call(inner, 16, tile_size=tile_size, store=store))
    # B and C without padding's values, in float32.
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * tile_size * 128 * 4 * 4


@CASES
@STORES
@pytest.mark.parametrize("steps", [slow(1), 4])
def test_update_kernel(slice_name, inner, store, steps):
    compiled = check_in_place(slice_name, update, update_call(inner, 64, steps, store=store))
    # The step sizes at most, in another layout: a fraction of the rows' states.
    assert compiled.memory_analysis().temp_size_in_bytes < steps * 64 * inner * 4 + (1 << 20)


def test_scan():
    call = scan_call(INNER, 16)
    memory = compile_for_tpu("v6e", by_xla(scan), *call, donate=STORE).memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    assert memory.temp_size_in_bytes < ALL_STATES / 8


def test_update():
    rows, steps = 64, 4
    call = update_call(INNER, rows, steps)
    memory = compile_for_tpu("v6e", by_xla(update), *call, donate=STORE).memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    # The rows' states, and those after each step at most once more.
    assert memory.temp_size_in_bytes < (steps + 3) * rows * STATE * INNER * 4


def by_xla(operation):
    return lambda *call: operation(*call, implementation="xla")


def test_replay():
    store, rows, steps = shape(2000, STATE, INNER, dtype=F32), 64, 4
    ring = (65, 32)
    tail = Tail(shape(*ring, INNER, dtype=BF16), shape(*ring, STATE, dtype=BF16), shape(*ring, INNER, dtype=F32))

    def run(donated, inputs, places):
        return selective_replay(*donated, *inputs, **dict(zip(PLACES, places, strict=True)), interval=16)

    places = [shape(rows, dtype=jnp.int32)] * len(PLACES)
    memory = compile_for_tpu("v6e", run, (store, tail), inputs(rows, steps), places, donate=0).memory_analysis()
    assert memory.alias_size_in_bytes >= sum(map(nbytes, (store, *tail)))
    # As the update, and no array of the tails' entries.
    assert memory.temp_size_in_bytes < (steps + 3) * rows * STATE * INNER * 4
