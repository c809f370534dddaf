"""The selective scan compiled by the TPU's own compiler: in place, and with bounded temporaries."""

import jax.numpy as jnp
import pytest
from real_shapes import BF16, F32, nbytes, shape
from topology import compile_for_tpu

from kernels_pallas.selective_scan import selective_replay, selective_scan, selective_update
from kernels_pallas.state_replay import Tail

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

INNER, STATE = 8192, 16
PLACES = ("anchor_slot", "tail_id", "anchor_length", "length", "num_tokens", "write_slot")
ALL_STATES = 2048 * STATE * INNER * 4
"""Bytes of the states after each of 2,048 tokens."""


def inputs(*lead):
    """x, dt, a, b, c and d of Falcon-Mamba-7B and Jamba Mini."""
    x, dt = shape(*lead, INNER, dtype=BF16), shape(*lead, INNER, dtype=F32)
    b = c = shape(*lead, STATE, dtype=BF16)
    return x, dt, shape(STATE, INNER, dtype=F32), b, c, shape(INNER, dtype=F32)


def test_scan():
    store, index = shape(200, STATE, INNER, dtype=F32), shape(16, dtype=jnp.int32)

    def run(store, inputs, first, read, write):
        return selective_scan(*inputs, store, tile_first=first, read_slot=read, write_slot=write)

    first = shape(16, dtype=bool)
    memory = compile_for_tpu("v6e", run, store, inputs(16, 128), first, index, index, donate=0).memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(store)
    assert memory.temp_size_in_bytes < ALL_STATES / 8


def test_update():
    store, rows, steps = shape(2000, STATE, INNER, dtype=F32), 64, 4

    def run(store, inputs, read, write):
        return selective_update(*inputs, store, read_slot=read, write_slot=write)

    index = shape(rows, dtype=jnp.int32), shape(rows, steps, dtype=jnp.int32)
    memory = compile_for_tpu("v6e", run, store, inputs(rows, steps), *index, donate=0).memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(store)
    # The rows' states, and those after each step at most once more.
    assert memory.temp_size_in_bytes < (steps + 3) * rows * STATE * INNER * 4


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
