"""Products and functions of elements as Pallas kernels for TPU and GPU. Bits do not depend on the number of rows.

A program of the grid computes one block, always with the same instructions: more rows are more programs. A row of a
product is multiplied with whole blocks of the inputs, one after the other, and added up in their order in float32. How
the inputs are cut depends on the weight alone.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Num

F32 = jnp.float32
_BLOCKS = {"tpu": (64, 128, 512), "gpu": (64, 64, 32)}
"""Rows, outputs and inputs of a block: the inputs at most, in steps of a TPU's lanes."""
_PARAMETERS: dict[str, Any] = {
    "tpu": pltpu.CompilerParams(vmem_limit_bytes=60 << 20),
    "gpu": plt.CompilerParams(num_warps=4, num_stages=1),
}
_ELEMENTS = 64, 128


def product(
    rows: Float[Array, "n inputs"], weight: Num[Array, "outputs inputs"], *, platform: str, interpret: bool
) -> Float[Array, "n outputs"]:
    """See `fixed_order.product`. Numbers that are not both bfloat16 are multiplied in float32, in full precision."""
    (count, inputs), outputs = rows.shape, len(weight)
    if 0 in (count, outputs, inputs):  # a grid has a program at least
        return jnp.zeros((count, outputs), F32)
    narrow = rows.dtype == weight.dtype == jnp.bfloat16
    dtype, (height, width, most) = jnp.bfloat16 if narrow else F32, _BLOCKS[platform]
    depth = math.gcd(inputs + -inputs % min(most, 128), most)
    rows, weight = _whole(rows, height, depth), _whole(weight, width, depth)
    total = pl.pallas_call(
        functools.partial(_product, depth=depth, dtype=dtype),
        # A weight's block stays in a TPU's fast memory for all rows.
        grid=(len(weight) // width, len(rows) // height),
        in_specs=[
            pl.BlockSpec((height, rows.shape[1]), lambda n, m: (m, 0)),
            pl.BlockSpec((width, rows.shape[1]), lambda n, m: (n, 0)),
        ],
        out_specs=pl.BlockSpec((height, width), lambda n, m: (m, n)),
        out_shape=jax.ShapeDtypeStruct((len(rows), len(weight)), F32),
        compiler_params=_PARAMETERS[platform],
        interpret=interpret,
        name="fixed_product",
    )(rows, weight)
    return total[:count, :outputs]


def _whole(matrix, rows, columns):
    """The matrix in whole blocks, zeros added."""
    return jnp.pad(matrix, [(0, -size % block) for size, block in zip(matrix.shape, (rows, columns), strict=True)])


def _product(rows, weight, total, *, depth, dtype):
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT

    def add(k, before):
        here = pl.ds(pl.multiple_of(k * depth, depth), depth)
        return before + lax.dot_general(
            rows[:, here].astype(dtype), weight[:, here].astype(dtype), (((1,), (1,)), ((), ())),
            precision=precision, preferred_element_type=F32,
        )  # fmt: skip

    total[...] = lax.fori_loop(0, rows.shape[1] // depth, add, jnp.zeros(total.shape, F32))


def elementwise(
    function: Callable[[Array], Array], x: Float[Array, "*shape"], *, platform: str, interpret: bool
) -> Float[Array, "*shape"]:
    """The function of each element, in float32."""
    if not x.size:
        return x
    flat = _whole(x.reshape(1, -1), 1, math.prod(_ELEMENTS)).reshape(-1, _ELEMENTS[1])

    def kernel(x, y):
        y[...] = function(x[...])

    block = pl.BlockSpec(_ELEMENTS, lambda n: (n, 0))
    y = pl.pallas_call(
        kernel, grid=(len(flat) // _ELEMENTS[0],), in_specs=[block], out_specs=block,
        out_shape=jax.ShapeDtypeStruct(flat.shape, F32), compiler_params=_PARAMETERS[platform], interpret=interpret,
        name="fixed_elements",
    )(flat)  # fmt: skip
    return y.reshape(-1)[: x.size].reshape(x.shape)
