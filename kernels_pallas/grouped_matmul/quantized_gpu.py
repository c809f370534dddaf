"""The grouped product with weights in few bits on Hopper: a Mosaic GPU kernel that widens weights in registers.

One warpgroup computes 64 outputs of one expert for all of its tokens, a block of tokens at a time. Narrow weights come
to shared memory by TMA, are widened and scaled in registers, and are the first operand of WGMMA, so the result is
transposed: [outputs, tokens]. Weights that are not multiples of 64 stay to `pallas_gpu.py`.
"""

import functools
import importlib.util
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.grouped_matmul.xla import of_experts, tokens_of_block
from kernels_pallas.quantized import bits_of

F32, FP8, FP4 = jnp.float32, jnp.float8_e4m3fn, jnp.float4_e2m1fn
MODULE = "jax.experimental.pallas.mosaic_gpu"
OUTPUTS = 64  # of a block
MOST_TOKENS = 64  # of a block
STAGES = 4
COPY = 128  # bytes that a copy by TMA is a multiple of


def unsupported(x, w, group_sizes):
    if importlib.util.find_spec(MODULE) is None:
        return f"this version of JAX has no {MODULE}"
    if x.dtype != jnp.bfloat16 or w.values.dtype not in (jnp.int8, FP8, jnp.int4, FP4):
        return f"it multiplies {x.dtype} by {w.values.dtype}"
    outputs, inputs = w.shape[1:]
    if outputs % OUTPUTS or inputs % 64:
        return f"weights are {outputs} x {inputs}, not multiples of 64"
    if _inputs_of_block(inputs, w.group) is None:
        return f"groups of {w.group} inputs are not divisible by blocks of 64, nor do they divide them"
    for scale in w.of_groups:
        if scale.dtype not in (F32, jnp.bfloat16, FP8, jnp.int8):
            return f"scales or zero points are {scale.dtype}"
        if scale.shape[1] % _rows_of_scale(w, scale):
            return f"{scale.shape[1]} rows of {scale.dtype} scales are not divisible by {_rows_of_scale(w, scale)}"
    return None


def grouped_matmul(x, w, group_sizes, interpret=None):
    """See `api.grouped_matmul`. `interpret` are parameters of JAX's interpreter of Mosaic GPU (JAX 0.12)."""
    tokens = x.shape[0]
    size = tokens_of_block(2 * tokens, w.shape[0], 8 if tokens < 16 else 16, MOST_TOKENS)
    group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    values = lax.bitcast_convert_type(w.values, jnp.int4) if w.values.dtype == FP4 else w.values
    channel = [] if w.channel_scale is None else [w.channel_scale.astype(F32)]
    padded = jnp.pad(x, ((0, max(-tokens % 8, size - tokens)), (0, 0)))  # a tile of shared memory has 8 rows
    out = _kernel(padded, w, size, interpret)(group_sizes, ends, padded, values, *w.of_groups, *channel)
    return of_experts(out[:tokens], group_sizes)


def _kernel(x, w, size, interpret):
    """Returns the kernel for arrays of these shapes and blocks of `size` tokens."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, (experts, outputs, inputs) = x.shape[0], w.shape
    group, block = w.group, _inputs_of_block(inputs, w.group)
    piece = min(block, group)  # inputs with one scale
    bits = bits_of(w.values.dtype)
    of_row = plgpu.Layout.WGMMA.reduce(1)
    # A thread loads 32 bits of a row; WGMMA wants 2 numbers of each thread, so threads exchange some, still narrow.
    loaded = plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X
    rows_of_scales = [_rows_of_scale(w, scale) for scale in w.of_groups]

    def tiled(columns, bits):
        swizzle = plgpu.find_swizzle(columns * bits)
        return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)

    def load(ref, layout, **options):
        index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # until JAX 0.11
        return plgpu.load(ref, *index, layout=layout, **options)

    def store(ref, values):
        if hasattr(plgpu, "store"):  # JAX 0.12 takes a store with bank conflicts for a mistake
            plgpu.store(ref, values, optimized=False)
        else:
            ref[...] = values

    def widen(values, scales):
        wide = _to_float32(values, w.values.dtype) if scales or w.values.dtype in (FP8, FP4) else values
        each = [_to_float32(load(s, of_row, optimized=False), s.dtype) for s in scales]
        each = [lax.broadcast_in_dim(s, values.shape, [0]) for s in each]
        if w.group_zero is not None:
            wide = wide - each[-1]
        if w.group_scale is not None:
            wide = wide * each[0]
        return wide.astype(x.dtype)

    def body(sizes, ends, x, values, *rest):
        groups, rest = rest[: len(rows_of_scales)], rest[len(rows_of_scales) :]
        channel, (out, staged, *shared) = rest[: w.channel_scale is not None], rest[w.channel_scale is not None :]
        expert, o = lax.axis_index("expert"), lax.axis_index("outputs")
        channels = pl.ds(o * OUTPUTS, OUTPUTS)
        end = ends[expert]
        start = end - sizes[expert]

        def multiply(total, indices, x_block, w_block, *scales):
            narrow = plgpu.layout_cast(load(w_block, loaded), plgpu.Layout.WGMMA)
            first = lax.div(indices[0] * block, group)
            for j in range(block // piece):
                columns = pl.ds(j * piece, piece)
                at = [s.at[lax.rem(first, n) + j] for s, n in zip(scales, rows_of_scales, strict=True)]
                wide = widen(narrow[:, j * piece : (j + 1) * piece], at)
                if shared:  # the interpreter multiplies arrays in shared memory only
                    shared[0][...] = wide
                    plgpu.commit_smem()
                    wide = shared[0]
                plgpu.wgmma(total, wide, x_block.at[:, columns].transpose((1, 0)))
            plgpu.wgmma_wait(0)

        def sums(origin, total):
            def place_scale(n):
                return lambda k: (lax.div(lax.div(k * block, group), n), o)

            plgpu.emit_pipeline(
                functools.partial(multiply, total),
                grid=(inputs // block,),
                in_specs=[
                    plgpu.BlockSpec((size, block), lambda k: (0, k), transforms=tiled(piece, 16)),
                    plgpu.BlockSpec((OUTPUTS, block), lambda k: (o, k), transforms=tiled(block, bits)),
                    *(plgpu.BlockSpec((n, OUTPUTS), place_scale(n)) for n in rows_of_scales),
                ],
                max_concurrent_steps=STAGES,
            )(x.at[pl.ds(origin, size)], values.at[expert], *(s.at[expert] for s in groups))
            return total[...]

        @pl.loop(0, lax.div(end - start + size - 1, size))
        def _(i):
            first = start + i * size
            count = jnp.minimum(end - first, size)
            # A block that would reach beyond the last token begins earlier; its first rows are not stored.
            origin = jnp.minimum(first, rows - size)
            total = pl.run_scoped(functools.partial(sums, origin), plgpu.ACC((OUTPUTS, size)))
            if channel:
                scale = load(channel[0].at[expert, channels], of_row, optimized=False)
                total = total * lax.broadcast_in_dim(scale, total.shape, [0])
            total = plgpu.layout_cast(total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store(staged.transpose((1, 0)), total)
            plgpu.commit_smem()
            # The size of a copy is fixed when it is compiled, so there is one for each bit of `count`.
            stored = jnp.int32(0)
            for part in (1 << bit for bit in reversed(range(size.bit_length()))):

                @pl.when(count & part != 0)
                def _(stored=stored, part=part):
                    source = staged.at[pl.ds(first - origin + stored, part)]
                    plgpu.copy_smem_to_gmem(source, out.at[pl.ds(first + stored, part), channels])

                stored += count & part
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    shared = [] if interpret is None else [plgpu.SMEM((OUTPUTS, piece), x.dtype, transforms=tiled(piece, 16))]
    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        scratch_types=[plgpu.SMEM((size, OUTPUTS), x.dtype), *shared], grid=(experts, outputs // OUTPUTS),
        grid_names=("expert", "outputs"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="quantized_grouped_matmul", **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip


def _to_float32(values, dtype):
    """Returns the values of a narrow dtype; those of 4-bit floats come as codes in int4. Each step is exact."""
    if dtype == FP4:
        # Exponent and magnitude move to the end of float16's exponent, whose bias is 14 more; the sign is extended.
        code = values.astype(jnp.int8).astype(jnp.int16)
        half = lax.bitcast_convert_type(((code << 12) >> 3) & jnp.int16(-0x7200), jnp.float16)
        return half.astype(F32) * 2.0**14
    if dtype == FP8:
        return values.astype(jnp.float16).astype(F32)
    return values.astype(jnp.bfloat16).astype(F32) if dtype == jnp.int4 else values.astype(F32)


def _inputs_of_block(inputs, group):
    """Returns the number of inputs of a block, of one group or of whole groups of a multiple of 16; or None."""
    fitting = (n for n in (128, 64) if inputs % n == 0 and (group % n == 0 or (n % group == 0 and group % 16 == 0)))
    return next(fitting, None)


def _rows_of_scale(w, scale):
    """Returns the number of groups whose scales are copied at a time."""
    pieces = max(1, _inputs_of_block(w.shape[2], w.group) // w.group)
    return max(pieces, COPY // (OUTPUTS * scale.dtype.itemsize))
