"""The grouped product with quantized weights, as a TPU kernel, which widens each block just before multiplying it.

XLA fuses a conversion into a product, but it writes a wide copy of the weight to memory if group scales are applied or
a grouped product follows. This kernel expands scales [groups, outputs] to one for each weight by a product with zeros
and ones on the matrix unit, because a TPU cannot repeat numbers along lanes.

Blocks of tokens are those of `jax.experimental.pallas.ops.tpu.megablox`: each is visited once for every expert that has
tokens in it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.grouped_matmul.pallas_tpu import lies_inputs_first
from kernels_pallas.grouped_matmul.quantized import by_channel
from kernels_pallas.grouped_matmul.xla import of_experts
from kernels_pallas.quantized import bits_of
from kernels_pallas.tpu_blocks import F32, LANES, dot

SUBLANES = 32
# Tokens, outputs and inputs of a block.
TOKENS, OUTPUTS, INPUTS = 128, 512, 512


def unsupported(x, w, group_sizes):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it multiplies {x.dtype}"
    if _inputs_of_block(w) > 8 * INPUTS:
        return f"{w.shape[2]} inputs are no multiple of {LANES}"
    return None


def grouped_matmul(x, w, group_sizes, *, codes=False, interpret=False):
    return by_channel(x, w, group_sizes, product(x, w, group_sizes, codes=codes, interpret=interpret))


def product(x, w, group_sizes, *, codes=False, interpret=False):
    """Returns the grouped product without channel scales, in float32.

    Before TPU7x, kernels do not support 4-bit floats; with `codes`, the kernel reads them as integers.
    """
    tokens, (experts, outputs, inputs) = x.shape[0], w.shape
    size = min(TOKENS, -(-tokens // 16) * 16)
    x = jnp.pad(x, ((0, -tokens % size), (0, 0)))
    block, width = _inputs_of_block(w), min(OUTPUTS, outputs)
    visits, count = _visits(group_sizes.astype(jnp.int32), size, x.shape[0] // size + experts - 1)
    values, as_codes = w.values, codes and w.values.dtype == jnp.float4_e2m1fn
    if as_codes:
        values = lax.bitcast_convert_type(values, jnp.int4)
    inputs_first = lies_inputs_first(w.shape)
    if inputs_first:
        values = jnp.swapaxes(values, 1, 2)

    def place_values(n, i, k, expert, tile, start, end):
        return (expert[i], k, n) if inputs_first else (expert[i], n, k)

    grid = (pl.cdiv(outputs, width), count, inputs // block)
    specs = [
        pl.BlockSpec((size, block), lambda n, i, k, expert, tile, start, end: (tile[i], k)),
        pl.BlockSpec((None, block, width) if inputs_first else (None, width, block), place_values),
    ]
    scales = w.of_groups
    groups = inputs // w.group
    of_block = groups * block // inputs
    whole = block < inputs and of_block % SUBLANES != 0  # too few groups to be a block

    def place_scale(n, i, k, expert, tile, start, end):
        return expert[i], 0 if whole else k, n

    specs += [pl.BlockSpec((None, groups if whole else of_block, width), place_scale) for _ in scales]
    run = functools.partial(
        _kernel, inputs=inputs, groups=groups, dtype=x.dtype, as_codes=as_codes, inputs_first=inputs_first,
        scaled=w.group_scale is not None, shifted=w.group_zero is not None,
    )  # fmt: skip
    out = pl.pallas_call(
        run,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), F32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=grid,
            in_specs=specs,
            out_specs=pl.BlockSpec((size, width), lambda n, i, k, expert, tile, start, end: (tile[i], n)),
            scratch_shapes=[pltpu.VMEM((size, width), F32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(x, (values, *scales), outputs),
        interpret=interpret,
    )(*visits, x, values, *scales)[:tokens]
    return of_experts(out, group_sizes)


def _cost(x, weights, outputs):
    """Estimates a call's cost, assuming that tokens choose experts at random. Experts without tokens are not read."""
    tokens, inputs = x.shape
    experts = weights[0].shape[0]
    chosen = 1 - (1 - 1 / experts) ** tokens
    stored = sum(v.size * bits_of(v.dtype) // 8 for v in weights)
    return pl.CostEstimate(
        flops=2 * tokens * inputs * outputs,
        transcendentals=0,
        bytes_accessed=int(chosen * stored) + x.size * x.dtype.itemsize + 4 * tokens * outputs,
    )


def _kernel(expert, tile, start, end, x, values, *rest, inputs, groups, dtype, as_codes, inputs_first, scaled, shifted):
    *scales, out, total = rest
    visit, k = pl.program_id(1), pl.program_id(2)

    @pl.when(k == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    wide = _fp4(values[...]) if as_codes else values[...].astype(F32)
    repeat = functools.partial(
        _of_each_weight, block=x.shape[1], group=inputs // groups, groups=groups, k=k, inputs_first=inputs_first
    )
    if shifted:
        wide = wide - repeat(scales[-1])
    if scaled:
        wide = wide * repeat(scales[0])
    total[...] += dot(x[...], wide, (1, 0 if inputs_first else 1), dtype)

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
        size = out.shape[0]
        row = tile[visit] * size + lax.broadcasted_iota(jnp.int32, out.shape, 0)
        own = (row >= start[visit]) & (row < end[visit])
        out[...] = jnp.where(own, total[...], out[...])


def _of_each_weight(scale, *, block, group, groups, k, inputs_first):
    """Repeats scales [groups, outputs] for each of the block's inputs: [outputs, inputs] or [inputs, outputs]."""
    first = k * block if scale.shape[0] == groups else 0
    shape = (scale.shape[0], block)
    chosen = (lax.broadcasted_iota(jnp.int32, shape, 1) + first) // group == lax.broadcasted_iota(jnp.int32, shape, 0)
    # Values with at most 8 bits of mantissa pass through a product in bfloat16 unchanged.
    dtype = F32 if scale.dtype == F32 else jnp.bfloat16
    scales, chosen = scale[...], chosen.astype(F32)
    return dot(chosen, scales, (0, 0), dtype) if inputs_first else dot(scales, chosen, (0, 0), dtype)


def _fp4(codes):
    """Returns the values of e2m1 codes that were read as signed 4-bit integers."""
    codes = codes.astype(jnp.int32)
    magnitude = codes & 7
    value = jnp.where(magnitude < 4, magnitude, jnp.where(magnitude < 6, 2 * magnitude - 4, 4 * magnitude - 16))
    return jnp.where(codes < 0, -value, value).astype(F32) * 0.5


def _inputs_of_block(w):
    """Returns the number of inputs of a block: a multiple of the lanes, or all."""
    inputs = w.shape[2]
    fitting = [n for n in range(LANES, INPUTS + 1, LANES) if inputs % n == 0]
    return max(fitting, default=inputs)


def _visits(group_sizes, size, most):
    """Returns the expert, the block and the expert's first and last token of each visit, and the number of visits."""
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    blocks = jnp.where(group_sizes > 0, (ends - 1) // size - starts // size + 1, 0)
    after = jnp.cumsum(blocks)
    index = jnp.arange(most)
    expert = jnp.searchsorted(after, index, side="right", method="compare_all")
    expert = jnp.minimum(expert, group_sizes.shape[0] - 1).astype(jnp.int32)
    tile = starts[expert] // size + index - (after - blocks)[expert]
    tile = jnp.maximum(tile, 0).astype(jnp.int32)
    return (expert, tile, starts[expert], ends[expert]), after[-1]
