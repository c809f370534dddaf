"""Attention in plain JAX: an online softmax over pieces of the keys, without an array of all scores."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.dispatch import differentiable
from kernels_pallas.fixed_order import (
    F32,
    exp,
    is_fixed,
    kernel_options,
    log,
    products,
    quotient,
    rounded,
    row_max,
    row_sum,
)
from kernels_pallas.paged_attention.stripe import Stripe
from kernels_pallas.slots import load, put, read_slots

QUERIES = 128
"""Queries, and keys, per piece of `attention_sequence`; keys per piece of schedule-invariant attention, whose pieces
begin at multiples of it, or of a longer page."""


def paged_attention(q, kv, *, positions, page_table, block_row, scale, first_key=0, window=None):
    """See `api.paged_attention`. The target platform of compilation selects the form."""
    seen = {"scale": scale, "first_key": first_key, "window": window}
    cpu, default = (functools.partial(_whole, form, **seen) for form in (_one_by_one, _all_at_once))
    # A loop whose end is found at run time has no derivative.
    plain = functools.partial(_whole, _all_at_once, **seen, every_page=True)
    return differentiable(_by_platform(cpu, default), plain)(q, kv, positions, page_table, block_row)


def _by_platform(cpu, default):
    """Returns a function of arrays in the form of the platform that programs are compiled for."""
    if is_fixed():
        return cpu if kernel_options() is None else default
    return functools.partial(lax.platform_dependent, cpu=cpu, default=default)


def paged_attention_part(
    q, kv, *, positions, page_table, block_row, first_page, page_stride, scale, first_key=0, window=None
):
    """See `api.paged_attention_part`. The target platform of compilation selects the form."""
    *blocks, keys = _blocks(q, kv, positions, page_table, block_row)

    def part(form):
        seen = {"keys": keys, "scale": scale, "first_key": first_key, "window": window}
        return lambda first, *blocks: form(*blocks, **seen, stripe=Stripe(first, page_stride))

    carry = _by_platform(part(_one_by_one), part(_all_at_once))(first_page, kv, *blocks)
    highest, total, _ = carry
    lse = jnp.where(total > 0, highest + log(jnp.where(total > 0, total, 1)), -jnp.inf)
    return by_query(_finish(carry), q.shape[1]), by_query(lse[..., None], q.shape[1])[..., 0]


def attention_sequence(q, k, v, *, scale, window=None):
    batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    size = min(QUERIES, max(length, 1))
    chunks = -(-length // size)

    def cut(x):  # [batch, length, kv_heads * n, head_dim] -> [chunks, batch, kv_heads, n * size, head_dim]
        x = jnp.pad(x, ((0, 0), (0, chunks * size - length), (0, 0), (0, 0)))
        x = x.reshape(batch, chunks, size, kv_heads, -1, head_dim)
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(chunks, batch, kv_heads, -1, head_dim)

    queries, keys, values = cut(q), cut(k), cut(v)
    repeats = q_heads // kv_heads
    within = jnp.tile(jnp.arange(size), repeats)  # each query's place in its chunk

    # Rematerialized: the gradient keeps no scores.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(args):
        i, q = args

        def piece(carry, args):
            j, k, v = args
            key, place = j * size + jnp.arange(size), i * size + within
            seen, needed = _is_seen(key, place, window=window), j <= i
            if window is not None:
                needed &= (j + 1) * size > i * size - window + 1
            return lax.cond(
                needed, lambda carry: _attend(carry, q, k, v, seen, scale), lambda carry: carry, carry
            ), None

        carry, _ = lax.scan(piece, _nothing_seen(q), (jnp.arange(chunks), keys, values))
        return _finish(carry)

    out = lax.map(chunk, (jnp.arange(chunks), queries))
    out = out.reshape(chunks, batch, kv_heads, repeats, size, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return out.reshape(batch, chunks * size, q_heads, head_dim)[:, :length].astype(q.dtype)


def sequence_by_pages(q, k, v, *, scale, window=None):
    """See `api.attention_sequence`: the sequences become pages of a cache, so that pieces of keys are those of it."""
    batch, length, _, head_dim = q.shape
    pages = -(-length // QUERIES)

    def cut(x):  # [batch, length, ...] -> [batch * pages, keys, ...]
        x = jnp.pad(x, ((0, 0), (0, pages * QUERIES - length), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch * pages, QUERIES, *x.shape[2:])

    entries = cut(jnp.stack([k, v], axis=3).reshape(batch, length, -1, head_dim))
    places = {
        "positions": jnp.tile(jnp.arange(pages * QUERIES).reshape(pages, QUERIES), (batch, 1)),
        "page_table": jnp.arange(1, batch * pages + 1).reshape(batch, pages),
        "block_row": jnp.repeat(jnp.arange(batch), pages),
    }
    out = paged_attention(cut(q), jnp.pad(entries, ((1, 0), *[(0, 0)] * 3)), **places, scale=scale, window=window)
    return out.reshape(batch, pages * QUERIES, *q.shape[2:])[:, :length]


def _whole(form, q, kv, positions, page_table, block_row, **seen):
    """Returns the attention to all pages of each row, computed in a form."""
    queries, places, tables, keys = _blocks(q, kv, positions, page_table, block_row)
    carry = form(kv, queries, places, tables, keys=keys, **seen)
    return by_query(_finish(carry), q.shape[1]).astype(q.dtype)


def _all_at_once(kv, queries, places, tables, *, keys, every_page=False, **seen):
    """All blocks in parallel, over the pieces of keys that any query of the call sees, or over those of all pages."""
    first, end = _pieces(places, keys, kv.shape[1], **seen)
    if every_page:
        first, end = 0, tables.shape[1] * kv.shape[1] // keys
    attend = functools.partial(_attend_pages, kv, keys=keys, **seen)

    def piece(i, carry):
        return jax.vmap(functools.partial(attend, i))(carry, queries, places, tables)

    return lax.fori_loop(first, end, piece, jax.vmap(_nothing_seen)(queries))


def _one_by_one(kv, queries, places, tables, *, keys, **seen):
    """Loops over blocks, each from the first key that it sees to the last: half the work for a prompt, and data stay in
    cache."""

    def block(b, carries):
        q, place, table = load(queries, b), places[b], tables[b]
        if not is_fixed():  # XLA's products of few rows are slow in 16 bits
            q = q.astype(F32)

        def piece(i, carry):
            return _attend_pages(kv, i, carry, q, place, table, keys=keys, **seen)

        first, end = _pieces(place, keys, kv.shape[1], **seen)
        carry = lax.fori_loop(first, end, piece, _nothing_seen(q))
        return jax.tree.map(lambda all_blocks, own: put(all_blocks, own, b), carries, carry)

    return lax.fori_loop(0, queries.shape[0], block, jax.vmap(_nothing_seen)(queries))


def _pieces(positions, keys, page_size, *, window, stripe=None, **_):
    """Returns the first piece of keys that any query at these positions sees, and the piece after the last."""
    first, last = _first_key(positions, window), positions.max(initial=-1)
    if stripe is None:
        return first // keys, (last + keys) // keys
    first, end = (stripe.pages_before(page) for page in (first // page_size, last // page_size + 1))
    pages = keys // page_size
    return first // pages, (end + pages - 1) // pages


def _blocks(q, kv, positions, page_table, block_row):
    """Returns queries [blocks, kv_heads, repeats * q_len, head_dim], their positions [blocks, repeats * q_len], each
    block's pages, padded with page 0 to whole pieces, and the number of keys in a piece.
    """
    blocks, q_len, q_heads, head_dim = q.shape
    page_size, kv_heads = kv.shape[1], max(kv.shape[2] // 2, 1)
    repeats = q_heads // kv_heads
    if is_fixed():
        pages = max(1, QUERIES // page_size)
    else:
        # Enough keys to keep the products efficient, few enough to keep their scores in cache.
        wanted = 256 if repeats * q_len <= 64 else 128
        pages = max(1, min(page_table.shape[1], wanted // page_size))
    queries = q.reshape(blocks, q_len, kv_heads, repeats, head_dim).transpose(0, 2, 3, 1, 4)
    tables = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))[block_row]
    return queries.reshape(blocks, kv_heads, -1, head_dim), jnp.tile(positions, repeats), tables, pages * page_size


def by_query(out, q_len):
    """Converts [blocks, kv_heads, repeats * q_len, n] to [blocks, q_len, q_heads, n]."""
    blocks, kv_heads, queries, last = out.shape
    out = out.reshape(blocks, kv_heads, -1, q_len, last).transpose(0, 3, 1, 2, 4)
    return out.reshape(blocks, q_len, kv_heads * queries // q_len, last)


def _attend_pages(kv, i, carry, q, positions, table, *, keys, scale, first_key, window, stripe=None):
    """Continues one block's softmax over piece i of its row's keys."""
    pages = keys // kv.shape[1]
    entries = read_slots(kv, lax.dynamic_slice_in_dim(table, i * pages, pages))
    entries = entries.reshape(keys, -1, min(kv.shape[2], 2), kv.shape[3]).transpose(2, 1, 0, 3)
    key = i * keys + jnp.arange(keys)
    if stripe is not None:
        key = stripe.position(key, kv.shape[1])
    # Values that no query sees may be NaN (a page's tail), and 0 * NaN is NaN.
    used = ((key >= first_key) & (key <= positions.max()))[:, None]
    k, v = (jnp.where(used, one, 0).astype(q.dtype) for one in (entries[0], entries[-1]))  # of latents the same
    return _attend(carry, q, k, v, _is_seen(key, positions, first_key=first_key, window=window), scale)


def _is_seen(key, position, *, first_key=0, window=None):
    """Returns [queries, keys]: whether a query at a position (-1 = padding) sees a key."""
    seen = (key >= first_key) & (key <= position[:, None])
    return seen if window is None else seen & (key > position[:, None] - window)


def _first_key(positions, window):
    """Returns the first key that any query at these positions sees."""
    if window is None:
        return 0
    first = jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max).min(initial=jnp.iinfo(jnp.int32).max)
    return jnp.maximum(first - window + 1, 0)


def _nothing_seen(q):
    """Returns the initial values of an online softmax: highest score, sum of weights, sum of weighted values."""
    return jnp.full(q.shape[:-1], -jnp.inf, F32), jnp.zeros(q.shape[:-1], F32), jnp.zeros(q.shape, F32)


def _attend(carry, q, k, v, seen, scale):
    """Continues an online softmax over more keys: q [..., queries, head_dim], k and v [..., keys, head_dim], seen
    [queries, keys]. Source: "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018).
    """
    highest, total, out = carry
    scores = jnp.where(seen, scale * _products(q, k), -jnp.inf)
    higher = jnp.maximum(highest, lax.stop_gradient(row_max(scores)[..., 0]))
    base = jnp.where(higher == -jnp.inf, 0, higher)  # no key seen yet: avoids inf - inf
    weights, shrink = exp(scores - base[..., None]), exp(highest - base)
    out = rounded(out * shrink[..., None]) + _products(weights.astype(v.dtype), v.swapaxes(-1, -2))
    return higher, rounded(total * shrink) + row_sum(weights)[..., 0], out


def _products(rows, weights):
    """Rows [..., n, inputs] times the transposes of weights [..., outputs, inputs]."""
    if is_fixed():
        return products(rows, weights)
    # In lower precisions the products may round as the model's own do.
    precision = lax.Precision.HIGHEST if rows.dtype == F32 else lax.Precision.DEFAULT
    return jnp.einsum("...qd,...kd->...qk", rows, weights, preferred_element_type=F32, precision=precision)


def _finish(carry):
    _, total, out = carry
    return quotient(out, jnp.where(total > 0, total, 1)[..., None])
