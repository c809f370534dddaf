"""Paged attention as one Triton kernel: each program takes some queries of one block and kv head over some of its keys.

The keys of a row are split over programs, so that a few long rows can fill a GPU. A program reads its row's length and
ends at once if it has no keys. The results of a row's programs are combined afterwards ("Flash-Decoding": Dao et al.,
2023). Keys and values are read in place: a piece of keys is a page, or a part of one.

Queries of a block that share a kv head are the rows of one product: all of its query heads, at all its positions. Of
latents that is every query head, and a piece of keys, read once, is also the piece of values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.paged_attention.stripe import Stripe
from kernels_pallas.triton_blocks import LEAST, dot, load_if, offsets_overflow, pieces, power_of_two_in, store_if

F32 = jnp.float32
QUERIES, KEYS = 64, 64
"""At most, in one product."""
SPLIT_KEYS = 256
"""A row's keys are not divided further."""
PROGRAMS, SPLITS = 1024, 256
"""Keys are split until this number of programs is reached, into at most this number of parts."""
WIDE = 256
"""Heads wider than this, which are latents, take twice the warps for half the queries, and one program fills a
multiprocessor: more programs would only write more partial results."""


def unsupported(q, kv, *, window=None, **_):
    if window is not None:
        return f"queries see only the last {window} keys"
    if kv.dtype not in (q.dtype, jnp.float8_e4m3fn) or q.dtype not in (jnp.bfloat16, jnp.float16, F32):
        return f"queries are {q.dtype}, keys and values {kv.dtype}"
    if offsets_overflow(kv):
        return "offsets into the cache do not fit in 32 bits"
    if q.shape[3] % LEAST:
        return f"heads have a size of {q.shape[3]}, not a multiple of {LEAST}"
    if power_of_two_in(kv.shape[1], LEAST) < LEAST:
        return f"pages hold {kv.shape[1]} keys, not a multiple of {LEAST}"
    return None


def paged_attention(
    q, kv, *, positions, page_table, block_row, scale, first_key=0, window=None, interpret=False
):  # fmt: skip
    found = _run(q, kv, positions, page_table, block_row, scale, first_key, partial=False, interpret=interpret)
    return found[0].astype(q.dtype)


def paged_attention_part(
    q, kv, *, positions, page_table, block_row, first_page, page_stride, scale, first_key=0, window=None,
    interpret=False,
):  # fmt: skip
    """See `api.paged_attention_part`. To the kernel, a row's keys of the part are all that there are: they are counted
    without those of other parts, and a query sees those up to the last one that is not after it."""
    stripe, size = Stripe(first_page, page_stride), kv.shape[1]
    first = jnp.asarray(stripe.keys_before(first_key, size)) if first_key else 0
    last = stripe.keys_before(positions + 1, size) - 1
    return _run(q, kv, last, page_table, block_row, scale, first, partial=True, interpret=interpret)


def _run(q, kv, positions, page_table, block_row, scale, first_key, *, partial, interpret):
    """Returns the weighted values, and if `partial` the logarithms of the sums of weights, both in float32 then."""
    blocks, q_len, q_heads, head_dim = q.shape
    kv_heads, wide = max(kv.shape[2] // 2, 1), head_dim > WIDE
    repeats = q_heads // kv_heads
    # Neighbors are at the same position, so a program's queries see almost the same keys.
    queries = q.reshape(blocks, q_len, kv_heads, repeats, head_dim).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(blocks, kv_heads, q_len * repeats, head_dim)
    places = jnp.repeat(positions, repeats, axis=1)
    count = q_len * repeats
    part = min(QUERIES // 2 if wide else QUERIES, max(LEAST, pl.next_power_of_2(count)))
    padding = -count % part
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    places = jnp.pad(places, ((0, 0), (0, padding)), constant_values=-1).astype(jnp.int32)

    parts = (count + padding) // part
    most = PROGRAMS // 4 if wide else PROGRAMS
    splits = _splits(blocks * kv_heads * parts, page_table.shape[1] * kv.shape[1], most)
    partial = partial or splits > 1
    found = (blocks, kv_heads, splits, count + padding)
    shapes = [jax.ShapeDtypeStruct((*found, head_dim), F32), *[jax.ShapeDtypeStruct(found, F32)] * 2]
    is_known = isinstance(first_key, int)
    kernel = functools.partial(
        _kernel, scale=scale, known_first_key=first_key if is_known else None, splits=splits, part=part, partial=partial
    )
    out, *weights = pl.pallas_call(
        kernel,
        # The programs of one part of a row's keys follow each other: its heads share pages.
        grid=(parts * kv_heads, splits, blocks),
        out_shape=shapes if partial else [jax.ShapeDtypeStruct((*found, head_dim), q.dtype)],
        compiler_params=plt.CompilerParams(num_warps=8 if wide else 4, num_stages=2),
        interpret=interpret,
        name="paged_attention",
    )(
        block_row.astype(jnp.int32), page_table.astype(jnp.int32), places, queries, kv,
        None if is_known else first_key.astype(jnp.int32).reshape(1),
    )  # fmt: skip
    joined = _joined(out, *weights) if weights else (out[:, :, 0],)

    def by_query(found):
        found = found[:, :, :count].reshape(blocks, kv_heads, q_len, repeats, -1).transpose(0, 2, 1, 3, 4)
        return found.reshape(blocks, q_len, q_heads, -1)

    out, *lse = (by_query(each) for each in joined)
    return out, *(each[..., 0] for each in lse)


def _joined(out, highest, total):
    """Joins what the programs of a row's keys found: weighted values, highest scores and sums of weights.

    Returns the weighted values, and the logarithms of the sums of all weights, -inf without a key.
    """
    base = jnp.maximum(highest.max(axis=2, keepdims=True), jnp.finfo(F32).min)
    shrink = jnp.exp(highest - base)
    whole = (shrink * total).sum(axis=2)
    # A program without keys writes nothing.
    out = jnp.where((total > 0)[..., None], shrink[..., None] * out, 0).sum(axis=2)
    lse = jnp.where(whole > 0, base[:, :, 0] + jnp.log(jnp.where(whole > 0, whole, 1)), -jnp.inf)
    return out / jnp.where(whole > 0, whole, 1)[..., None], lse


def _splits(programs, keys, most=PROGRAMS):
    """Parts that a row's keys are divided into, for at most this number of programs."""
    most = min(SPLITS, max(1, most // programs), -(-keys // SPLIT_KEYS))
    return 1 << (most.bit_length() - 1)


def _kernel(
    block_row, page_table, positions, q, kv, first_key, out, *weights_out, scale: float, known_first_key: int | None,
    splits: int, part: int, partial: bool,
):  # fmt: skip
    # The interpreter does not accept plain integers.
    first_key = known_first_key if first_key is None else plt.load(first_key.at[jnp.int32(0)])
    which, split, block = (pl.program_id(axis) for axis in range(3))
    page_size, kv_heads, columns = kv.shape[1], max(kv.shape[2] // 2, 1), pieces(kv.shape[3])
    # Widening latents in registers takes more of them.
    piece = power_of_two_in(page_size, KEYS // 2 if kv.shape[3] > WIDE and kv.dtype.itemsize == 1 else KEYS)
    head, here = lax.rem(which, kv_heads), pl.ds(lax.div(which, kv_heads) * part, part)
    place = plt.load(positions.at[block, here])
    last, row = jnp.max(place), plt.load(block_row.at[block])
    count = lax.div(last + piece, piece)
    each = jnp.maximum(lax.div(count + splits - 1, splits), SPLIT_KEYS // piece)
    # A head whose size is no power of two is a sum over pieces of it.
    queries = [plt.load(q.at[block, head, here, column]) for column in columns]
    product = functools.partial(dot, dtype=q.dtype)

    def attend(i, carry):
        peak, weight, sums = carry
        page = plt.load(page_table.at[row, lax.div(i * piece, page_size)])
        span = pl.ds(lax.rem(i * piece, page_size), piece)
        key = i * piece + lax.broadcasted_iota(jnp.int32, (1, piece), 1)
        # Values that no query sees may be NaN (a page's tail), and 0 * NaN is NaN: they are not looked at.
        used = (key >= first_key) & (key <= last)

        def load(entry, column):
            found = load_if(used.T, kv.at[page, span, entry, column], piece, column.size)
            # Triton converts 8 bits to 16 by way of 32.
            return found.astype(F32) if kv.dtype.itemsize == 1 else found

        seen = (key >= first_key) & (key <= place[:, None])
        keys = [load(2 * head, column) for column in columns]
        values = keys if kv.shape[2] == 1 else [load(2 * head + 1, column) for column in columns]
        parts = [product(own, found.T) for own, found in zip(queries, keys, strict=True)]
        scores = jnp.where(seen, scale * sum(parts[1:], parts[0]), -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(scores, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # no key seen yet: avoids inf - inf
        weights, shrink = jnp.exp(scores - base[:, None]), jnp.exp(peak - base)
        sums = tuple(own * shrink[:, None] + product(weights, found) for own, found in zip(sums, values, strict=True))
        return higher, weight * shrink + jnp.sum(weights, axis=1), sums

    nothing = tuple(jnp.zeros((part, column.size), F32) for column in columns)
    start = (jnp.full(part, -jnp.inf, F32), jnp.zeros(part, F32), nothing)
    end = jnp.minimum((split + 1) * each, count)
    peak, weight, sums = lax.fori_loop(split * each, end, attend, start)
    if not partial:
        sums = tuple(own / jnp.where(weight > 0, weight, 1.0)[:, None] for own in sums)
    for own, column in zip(sums, columns, strict=True):
        write = (weight[:, None] > 0) | (not partial)
        store_if(write, out.at[block, head, split, here, column], own.astype(out.dtype))
    if partial:
        for each, value in zip(weights_out, (peak, weight), strict=True):
            plt.store(each.at[block, head, split, here], value)
