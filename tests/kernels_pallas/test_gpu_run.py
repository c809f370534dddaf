"""Triton kernels on a GPU: `JAX_PLATFORMS=cuda pytest -m gpu`. (`mamba-jax check` times them.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import assert_close, assert_same_bits

from kernels_pallas.dispatch import UnsupportedError
from tests.kernels_pallas.calls.call import Draw
from tests.kernels_pallas.calls.calls import OPERATIONS, drawn

pytestmark = pytest.mark.gpu
KERNELS = [
    name
    for name, operation in OPERATIONS.items()
    if any(one.name == "pallas_gpu" for one in operation.implementations) and name != "expert_choice"
]
BF16 = jnp.bfloat16


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")


@pytest.mark.parametrize("store", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize(
    ("operation", "shape"),
    [pytest.param(name, shape, id=f"{name} {shape.name}") for name in KERNELS for shape in OPERATIONS[name].shapes[:2]],
)
def test_kernel_equals_xla(operation, shape, dtype, store):
    """The first row of a prompt or step is a fresh one, and other slots stay as they are."""
    shape = dataclasses.replace(shape, rows=min(shape.rows, 16)) if hasattr(shape, "rows") else shape
    call = drawn(operation, shape, Draw(dtype, store=store, slots=64))

    def fresh(path, place):
        name = getattr(path[-1], "name", getattr(path[-1], "key", ""))
        return place.at[0].set(0) if name in ("read_slot", "anchor_slot") else place

    places = jax.tree_util.tree_map_with_path(fresh, dict(call.places))
    if call.stores and hasattr(shape, "state_shape"):
        states, *others = call.stores
        call = dataclasses.replace(call, stores=(Draw(store)(*states.shape).at[0].set(jnp.nan), *others))
    found = {}
    for name in ("pallas_gpu", "xla"):
        run = jax.jit(call.program(name))
        try:
            stores, y = run(call.stores, call.inputs, places)
        except UnsupportedError as error:
            pytest.skip(str(error))
        found[name] = y, [array[1:] for array in jax.tree.leaves(stores)]
    (y, after), (want_y, want) = found["pallas_gpu"], found["xla"]
    loose = 2e-2 if BF16 in (dtype, store) else 2e-4
    assert_close(y, want_y, tolerance=loose)
    for one, other in zip(after, want, strict=True):
        assert_close(one, other, tolerance=loose)
    written = [getattr(place, "write_slot", None) for place in places.values()] + [places.get("write_slot")]
    for write_slot in (slots for slots in written if call.stores and slots is not None):
        untouched = np.setdiff1d(np.arange(1, len(call.stores[0])), write_slot)
        assert_same_bits(np.asarray(after[0])[untouched - 1], np.asarray(call.stores[0])[untouched])
