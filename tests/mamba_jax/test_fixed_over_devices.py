"""Schedule-invariant arithmetic over several devices: sums have an order, and a head is not gathered."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import fixed_order
from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.linear import linear
from kernels_pallas.native import WHY_MISSING
from mamba_jax.sharding import TENSOR, make_mesh
from mamba_jax.sharding.axis import split_last, sum_over_devices, use_mesh

CHOICES = [
    KernelChoice(platform="tpu", named=fixed_order.INTERPRETED),
    pytest.param(
        KernelChoice(platform="cpu", named=fixed_order.NAME),
        marks=pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}"),
    ),
]


def compiled(choice, function, mesh, *arrays):
    """The program of a function, of which each array is (values, how they lie), and its result."""
    placed = [jax.device_put(values, NamedSharding(mesh, spec)) for values, spec in arrays]
    with choice.applied(), use_mesh(mesh):
        program = jax.jit(function).lower(*placed).compile(fixed_order.COMPILER_OPTIONS)
    return program.as_text(), program(*placed)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_devices_add_in_their_order_and_round_once(dtype, scatter):
    parts = (np.random.default_rng(4).normal(size=(8, 16, 5)) * 10.0 ** np.arange(8)[:, None, None]).astype(dtype)
    expected = functools.reduce(np.add, parts.astype(np.float32)).astype(dtype)

    def each(part):
        return sum_over_devices(part[0], scatter=scatter)

    mesh = make_mesh(8)
    outside = jax.shard_map(
        each, mesh=mesh, in_specs=P(TENSOR), out_specs=P(TENSOR) if scatter else P(), check_vma=False
    )
    text, result = compiled(CHOICES[0], outside, mesh, (parts, P(TENSOR)))
    np.testing.assert_array_equal(np.asarray(result), expected)
    assert " all-reduce" not in text
    assert " reduce-scatter" not in text


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("members", [1, 2])
def test_a_divided_head_is_not_gathered_and_has_the_bits_of_a_whole_one(members, choice):
    random = np.random.default_rng(0)
    rows, head = (jnp.asarray(random.normal(size=(count, 96)), jnp.bfloat16) for count in (9, 520))

    def logits(rows, head):
        return split_last(linear(rows, head, out_dtype=jnp.float32))

    def over(devices, spec):
        mesh = make_mesh(devices // members, members=members)
        return compiled(choice, functools.partial(logits), mesh, (rows, P()), (head, spec))

    (_, whole), (text, divided) = over(members, P()), over(8, P(TENSOR))
    np.testing.assert_array_equal(np.asarray(divided), np.asarray(whole))
    assert " all-gather" not in text
