"""Attention's definition: one query after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.token_loop import wide


def _attend(q, k, v, scale):
    """One query [q_heads, head_dim] over keys and values [keys, kv_heads, head_dim]."""
    repeats = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scores = scale * (q[None] * k).sum(-1)  # [keys, q_heads]
    weights = np.exp(scores - scores.max(0))
    return (weights[..., None] * v).sum(0) / weights.sum(0)[:, None]


def write_kv(kv, k, v, *, page, offset):
    """Implements `api.write_kv`."""
    kv = np.array(kv)
    for t in range(k.shape[0]):
        if page[t]:
            kv[page[t], offset[t], 0::2] = np.asarray(k[t]).astype(kv.dtype)
            if v is not None:
                kv[page[t], offset[t], 1::2] = np.asarray(v[t]).astype(kv.dtype)
    return kv


def copy_pages(kv, *, source, target):
    """Implements `api.copy_pages`."""
    before = np.asarray(kv)
    after = before.copy()
    for s, t in zip(source, target, strict=True):
        if s and t:
            after[t] = before[s]
    return after


def paged_attention(q, kv, *, positions, page_table, block_row, scale, first_key=0, window=None):
    """Implements `api.paged_attention`, in float64."""
    q, kv, size = wide(q), wide(kv), kv.shape[1]
    out = np.zeros_like(q)
    for block in range(q.shape[0]):
        table = page_table[block_row[block]]
        for i, position in enumerate(positions[block]):
            first = first_key if window is None else max(first_key, position - window + 1)
            if position >= first_key:
                entries = np.stack([kv[table[p // size], p % size] for p in range(first, position + 1)])
                keys, values = entries[:, 0::2], entries[:, 1 % entries.shape[1] :: 2]  # of latents the same
                out[block, i] = _attend(q[block, i], keys, values, scale)
    return out


def attention_sequence(q, k, v, *, scale, window=None):
    """Implements `api.attention_sequence`, in float64."""
    q, k, v = wide(q), wide(k), wide(v)
    out = np.zeros_like(q)
    for row in range(q.shape[0]):
        for t in range(q.shape[1]):
            seen = slice(0 if window is None else max(t - window + 1, 0), t + 1)
            out[row, t] = _attend(q[row, t], k[row, seen], v[row, seen], scale)
    return out
