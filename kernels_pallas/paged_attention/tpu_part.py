"""Attention on TPU to the pages of one member, with the logarithm of the sum of weights: an own kernel.

JAX's kernel returns no such logarithm, and takes a sequence's keys to be all of them up to its last query. Here a block
of queries goes through its row's pages of the member only, in pieces of a few pages, with an online softmax. Pages come
one piece ahead into one of two buffers, also from one block to the next one that has keys. What a query sees is told by
the positions of the keys in the whole row, so windows and hidden first keys need no form of their own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.paged_attention import pallas_tpu
from kernels_pallas.paged_attention.stripe import Stripe
from kernels_pallas.paged_attention.xla import by_query
from kernels_pallas.tpu_blocks import BF16, F32, LANES, dot

SUBLANES = 16
"""Rows of queries are a multiple of it, which fills a register in 16 and 32 bits."""
SCORES = 1 << 20
"""Of a kv head at once, at most: several arrays of so many float32 fit in VMEM."""


def unsupported(q, kv, *, page_table, first_key=0, **others):
    if q.dtype not in (BF16, F32) or kv.dtype not in (q.dtype, BF16, jnp.float8_e4m3fn):
        return f"queries are {q.dtype}, keys and values {kv.dtype}"
    return pallas_tpu.unsupported(q, kv, page_table=page_table, **others)


def paged_attention_part(
    q, kv, *, positions, page_table, block_row, first_page, page_stride, interpret=False, **seen
):  # fmt: skip
    """See `api.paged_attention_part`; a block's valid queries come first, at consecutive positions."""
    attend = functools.partial(_attend, kv, stripe=Stripe(first_page, page_stride), interpret=interpret, **seen)
    return pallas_tpu.in_calls(attend, q, positions, page_table, block_row)


def _attend(kv, q, positions, table, *, stripe, scale, interpret, first_key=0, window=None):
    """One call of the kernel."""
    blocks, q_len, q_heads, head_dim = q.shape
    page_size, kv_heads = kv.shape[1], kv.shape[2] // 2
    count = q_heads // kv_heads * q_len
    rows = -(-count // SUBLANES) * SUBLANES
    queries = q.reshape(blocks, q_len, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(blocks, kv_heads, count, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, rows - count), (0, 0)))

    pages = max(1, min(table.shape[1], min(pallas_tpu.KEYS, SCORES // rows) // page_size))
    start, number, last = positions[:, 0], (positions >= 0).sum(axis=1), positions.max(axis=1)
    first = first_key if window is None else jnp.maximum(start - window + 1, first_key)
    begin, end = (stripe.pages_before(page) for page in (first // page_size, last // page_size + 1))
    pieces = jnp.maximum(end - begin + pages - 1, 0) // pages
    # Of each block, and first of none: the next block with keys.
    following = jnp.where(pieces > 0, jnp.arange(blocks), blocks)
    following = jnp.append(lax.cummin(following, reverse=True), blocks)
    begin = jnp.broadcast_to(begin, (blocks,))
    scalars = (table.reshape(-1), begin, end, jnp.cumsum(pieces) - pieces, following, start, number, stripe.first[None])

    def block(last):
        return pl.BlockSpec((1, kv_heads, rows, last), lambda b, *_: (b, 0, 0, 0))

    shape = (blocks, kv_heads, rows)
    kernel = functools.partial(
        _kernel, scale=scale, first_key=first_key, window=window, q_len=q_len, every=stripe.every, interpret=interpret
    )
    out, lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(blocks,),
            in_specs=[block(head_dim), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=[block(head_dim), block(LANES)],
            scratch_shapes=[
                pltpu.VMEM((2, pages, *kv.shape[1:]), kv.dtype),
                pltpu.VMEM((kv_heads, rows, LANES), F32),
                pltpu.VMEM((kv_heads, rows, LANES), F32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((*shape, last), F32) for last in (head_dim, LANES)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=["arbitrary"], vmem_limit_bytes=pallas_tpu.VMEM_BYTES),
        interpret=interpret,
        name="paged_attention_part",
    )(*(each.astype(jnp.int32) for each in scalars), queries, kv)

    return by_query(out[:, :, :count], q_len), by_query(lse[:, :, :count, :1], q_len)[..., 0]


def _kernel(
    table, begin, end, before, following, start, number, first_page, q, kv, out, lse, buffers, peak, total, arrived, *,
    scale, first_key, window, q_len, every, interpret,
):  # fmt: skip
    block, blocks = pl.program_id(0), pl.num_programs(0)
    _, pages, size, entries, _ = buffers.shape
    rows, keys, width = q.shape[2], pages * size, table.shape[0] // begin.shape[0]
    pieces = lax.div(end[block] - begin[block] + pages - 1, pages)

    def fetch(of, piece, act):
        """Starts, or waits for, the copies of the pages of a block's piece."""
        place, page = lax.rem(before[of] + piece, 2), begin[of] + piece * pages
        for n in range(pages):

            @pl.when(page + n < end[of])
            def _(n=n):
                source = kv.at[table[of * width + page + n]]
                act(pltpu.make_async_copy(source, buffers.at[place, n], arrived.at[place]))

    pl.when((block == 0) & (following[0] < blocks))(lambda: fetch(following[0], 0, lambda copy: copy.start()))

    peak[...] = jnp.full(peak.shape, -jnp.inf, F32)
    total[...] = jnp.zeros(total.shape, F32)
    out[...] = jnp.zeros(out.shape, F32)
    query = lax.rem(lax.broadcasted_iota(jnp.int32, (rows, 1), 0), q_len)
    position = jnp.where(query < number[block], start[block] + query, -1)
    last = start[block] + number[block] - 1

    def positions_of(piece, axis):
        """The positions in the row of the keys of a piece, along an axis."""
        key = lax.broadcasted_iota(jnp.int32, (keys, 1) if axis == 0 else (1, keys), axis)
        page = first_page[0] + (begin[block] + piece * pages + lax.div(key, size)) * every
        return page * size + lax.rem(key, size)

    def attend(piece, _):
        more = piece + 1 < pieces
        of = jnp.where(more, block, following[block + 1])
        pl.when(of < blocks)(lambda: fetch(of, jnp.where(more, piece + 1, 0), lambda copy: copy.start()))
        fetch(block, piece, lambda copy: copy.wait())
        entries_here = buffers.at[lax.rem(before[block] + piece, 2)]
        key = positions_of(piece, 1)
        seen = (key >= first_key) & (key <= position)
        if window is not None:
            seen &= key > position - window
        # Values that no query sees may be NaN (a page's tail, a page that was not fetched), and 0 * NaN is NaN.
        column = positions_of(piece, 0)
        used = (column >= first_key) & (column <= last)
        for head in range(entries // 2):
            k, v = _key_and_value(entries_here, head, q.dtype, interpret)
            scores = jnp.where(seen, scale * dot(q[0, head], k, (1, 1), q.dtype), -jnp.inf)
            higher = jnp.maximum(peak[head, :, :1], jnp.max(scores, axis=1, keepdims=True))
            base = jnp.where(higher == -jnp.inf, 0.0, higher)  # no key seen yet: avoids inf - inf
            weights, shrink = jnp.exp(scores - base), jnp.exp(peak[head, :, :1] - base)
            sums = total[head, :, :1] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            out[0, head] = out[0, head] * shrink + dot(weights, jnp.where(used, v, 0), (1, 0), q.dtype)
            peak[head] = jnp.broadcast_to(higher, (rows, LANES))
            total[head] = jnp.broadcast_to(sums, (rows, LANES))

    lax.fori_loop(0, pieces, attend, None)
    for head in range(entries // 2):
        there = total[head] > 0
        sums = jnp.where(there, total[head], 1.0)
        lse[0, head] = jnp.where(there, peak[head] + jnp.log(sums), -jnp.inf)
        out[0, head] = out[0, head] / sums[:, :1]


def _key_and_value(buffer, head, dtype, interpret):
    """The keys and values of a head [keys, head_dim], in a buffer [pages, page_size, entries, head_dim], for products
    in a dtype. Neighbors along entries share words of 32 bits, of which a load takes every so many-th."""
    pages, size, entries, head_dim = buffer.shape
    keys, in_word = pages * size, 4 // buffer.dtype.itemsize
    if interpret:  # has no references of another shape
        return (buffer[:, :, 2 * head + n].reshape(keys, head_dim).astype(dtype) for n in range(2))
    flat = buffer.reshape(keys * entries, head_dim)
    if in_word == 1:
        return (flat[pl.ds(2 * head + n, keys, stride=entries)] for n in range(2))
    word = flat.bitcast(jnp.uint32)[pl.ds(2 * head // in_word, keys, stride=entries // in_word)]
    if in_word == 2:  # a bfloat16 is the upper half of a float32
        halves = word << 16, word & jnp.uint32(0xFFFF0000)
        return (pltpu.bitcast(half, F32).astype(dtype) for half in halves)
    first = 2 * head % in_word
    bits = (word >> (8 * (first + n)) for n in range(2))
    return (pltpu.bitcast(each.astype(jnp.uint8), buffer.dtype).astype(F32).astype(dtype) for each in bits)
