"""Triton kernels on a GPU: `JAX_PLATFORMS=cuda pytest -m gpu`. (benchmarks/gpu_check checks and times them.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_delta_scan
import test_ssd_scan
import test_state_update
from operation_checks import Draw, assert_close, assert_same_bits, jitted, on_device

from benchmarks.kernels.workloads import DELTA, MAMBA2
from kernels_pallas.delta_scan import delta_scan
from kernels_pallas.delta_update import delta_update
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import state_update

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")


def updates(shape, *, rows, store=np.float32, dtype=jnp.bfloat16, of=test_state_update, share=1):
    """A call with a fresh row, a row that writes the slot it reads, and padding, where input `share` is 0."""
    draw = Draw()
    slots = rows * (shape.steps + 1) + 2
    inputs = of.layer(draw, shape, rows, shape.steps, dtype=dtype)
    places = draw.slots(slots, rows, shape.steps + 1)
    read, write = places[:, 0].copy(), places[:, 1:].copy()
    write[0, -1], read[-1], inputs[share][-1, shape.steps // 2 :] = read[0], 0, 0
    return inputs, of.states(draw, shape, slots, store), test_state_update.where(read, write)


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", MAMBA2[:5], ids=lambda s: s.name)
def test_state_update_equals_xla(shape, store):
    check_update(state_update, *updates(shape, rows=min(shape.rows, 16), store=store), store)


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", DELTA, ids=lambda s: s.name)
def test_delta_update_equals_xla(shape, store):
    call = updates(shape, rows=min(shape.rows, 16), store=store, of=test_delta_scan, share=4)
    check_update(delta_update, *call, store)


def check_update(operation, inputs, states, places, store):
    y, after = jitted(operation, implementation="pallas_gpu")(*inputs, states, **places)
    want_y, want = jitted(operation, implementation="xla_all_rows")(*inputs, states, **places)
    assert_close(y, want_y, jnp.bfloat16)
    assert_close(after[1:], want[1:], store)
    untouched = np.setdiff1d(np.arange(1, len(states)), places["write_slot"])
    assert_same_bits(after[untouched], states[untouched])


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize("shape", MAMBA2[:5], ids=lambda s: s.name)
def test_ssd_scan_equals_xla(shape, dtype, store):
    check_scan(ssd_scan, test_ssd_scan, shape, dtype, store)


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize("shape", DELTA[:4], ids=lambda s: s.name)
def test_delta_scan_equals_xla(shape, dtype, store):
    check_scan(delta_scan, test_delta_scan, shape, dtype, store)


def check_scan(operation, of, shape, dtype, store):
    draw = Draw()
    inputs = of.layer(draw, shape, 6, shape.tile_size, dtype=dtype)
    of.pad(inputs, 2, shape.tile_size // 2 + 1)
    of.pad(inputs, 4, 0)
    states = of.states(draw, shape, 9, store)
    places = of.where([1, 0, 0, 1, 1, 1], [3, 0, 0, 0, 0, 5], [0, 7, 3, 2, 0, 8])
    y, after = jitted(operation, implementation="pallas_gpu")(*inputs, states, **places)
    want_y, want = jitted(operation, implementation="xla")(*inputs, states, **places)
    loose = 2e-2 if jnp.bfloat16 in (dtype, store) else 2e-4
    assert_close(y, want_y, tolerance=loose)
    assert_close(after[1:], want[1:], tolerance=loose)
    assert_same_bits(after[[1, 4, 5, 6]], states[[1, 4, 5, 6]])


def test_in_place():
    shape = dataclasses.replace(MAMBA2[1], rows=8)
    inputs, states, places = updates(shape, rows=8)

    def run(store, inputs, places):
        return state_update(*inputs, store, **places, implementation="pallas_gpu")

    args = on_device((states, inputs, places))
    memory = jax.jit(run, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes == states.nbytes
    assert memory.temp_size_in_bytes < states.nbytes / 16
