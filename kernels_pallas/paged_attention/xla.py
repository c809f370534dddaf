"""Attention in plain JAX: an online softmax over pieces of the keys, up to the last key that any query sees."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import read_slots, write_slots

F32 = jnp.float32
PIECE = 256  # keys per piece: enough work per product, little beyond the last key
QUERIES = 256  # queries per piece of `attention_sequence`


def _dot(spec, *operands):
    return jnp.einsum(spec, *operands, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


def write_kv(kv, k, v, *, page, offset):
    """See `api.write_kv`."""
    tokens, kv_heads, head_dim = k.shape
    entries = jnp.stack([k, v], axis=2).reshape(tokens, 2 * kv_heads, head_dim).astype(kv.dtype)
    pages, size = kv.shape[:2]
    flat = jnp.where(page > 0, page * size + offset, 0)
    return write_slots(kv.reshape(pages * size, *kv.shape[2:]), entries, flat).reshape(kv.shape)


def copy_pages(kv, *, source, target):
    """See `api.copy_pages`."""
    target = jnp.where(source > 0, target, 0)
    # Copies are rare, so this is a loop of one round or none (with `cond`, XLA:CPU would copy the cache).
    needed = (target > 0).any().astype(jnp.int32)
    return lax.fori_loop(0, needed, lambda _, kv: write_slots(kv, read_slots(kv, source), target), kv)


def paged_attention(q, kv, *, positions, page_table, block_row, scale, first_key=0):
    """See `api.paged_attention`. A loop with a dynamic trip count: not differentiable."""
    blocks, q_len, q_heads, head_dim = q.shape
    size, kv_heads = kv.shape[1], kv.shape[2] // 2
    repeats, table_width = q_heads // kv_heads, page_table.shape[1]
    pages = max(1, min(table_width, PIECE // size))  # per piece
    keys = pages * size
    table = jnp.pad(page_table, ((0, 0), (0, -table_width % pages)))[block_row]
    grouped = q.reshape(blocks, q_len, kv_heads, repeats, head_dim)

    def piece(i, carry):
        best, total, out = carry
        index = lax.dynamic_slice_in_dim(table, i * pages, pages, axis=1)
        entries = kv[index].reshape(blocks, keys, 2 * kv_heads, head_dim)
        key = i * keys + jnp.arange(keys)
        seen = (key >= first_key) & (key <= positions[:, :, None])  # [blocks, q_len, keys]
        # Values that nobody sees may be NaN (the null page, a page's tail), and 0 * NaN is NaN.
        used = seen.any(axis=1)[:, :, None, None]
        k, v = (jnp.where(used, entries[:, :, n::2], 0) for n in (0, 1))
        scores = jnp.where(seen[:, None, None], scale * _dot("bqhrd,bkhd->bhrqk", grouped, k), -jnp.inf)
        high = jnp.maximum(best, scores.max(-1))
        base = jnp.where(high == -jnp.inf, 0, high)  # no key seen yet: avoids inf - inf
        weights, shrink = jnp.exp(scores - base[..., None]), jnp.exp(best - base)
        out = out * shrink[..., None] + _dot("bhrqk,bkhd->bhrqd", weights.astype(v.dtype), v)
        return high, total * shrink + weights.sum(-1), out

    shape = (blocks, kv_heads, repeats, q_len)
    start = jnp.full(shape, -jnp.inf, F32), jnp.zeros(shape, F32), jnp.zeros((*shape, head_dim), F32)
    pieces = jnp.minimum((positions.max(initial=-1) + keys) // keys, table.shape[1] // pages)
    _, total, out = lax.fori_loop(0, pieces, piece, start)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def attention_sequence(q, k, v, *, scale):
    """See `api.attention_sequence`. Queries in chunks, so that no [length, length] scores are ever held."""
    batch, length, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    size = min(QUERIES, max(length, 1))
    chunks = -(-length // size)
    q = jnp.pad(q, ((0, 0), (0, chunks * size - length), (0, 0), (0, 0)))
    q = q.reshape(batch, chunks, size, kv_heads, q_heads // kv_heads, head_dim).swapaxes(0, 1)

    # Rematerialised: the gradient keeps no weights.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk(args):
        i, q = args
        seen = jnp.arange(length) <= (i * size + jnp.arange(size))[:, None]
        scores = jnp.where(seen, scale * _dot("bqhrd,bkhd->bhrqk", q, k), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        return _dot("bhrqk,bkhd->bqhrd", weights.astype(v.dtype), v).astype(q.dtype)

    out = lax.map(chunk, (jnp.arange(chunks), q))
    return out.swapaxes(0, 1).reshape(batch, chunks * size, q_heads, head_dim)[:, :length]
