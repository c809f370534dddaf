"""Attention on TPU by the kernel that JAX keeps: `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

It takes packed queries of sequences of any length; the queries of a sequence are its last tokens. A row of a prefill
step is one sequence: its tiles follow each other, and where it is long the kernel takes several of them at a time,
which read the keys before them once. In decoding we pass every block as a separate sequence, which ends at the block's
last query. `xla` handles calls that the kernel does not support: hidden first keys (draft layers), and heads that are
not whole registers.

The kernel keeps the page tables of all its sequences in scalar memory. Where they do not fit, every block is a
sequence, and blocks are divided over several calls; they share nothing, so the result is the same.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

LANES = 128
# Every TPU so far has 1 MiB of scalar memory for page tables and the kernel's other scalars, which need little.
SCALAR_BYTES = 900 * 1024
# Sizes of the kernel's blocks. Its own table of them asks the attached TPU; when compiling ahead no TPU is attached.
# A block of queries reads a sequence's keys once, so long prefill wants large blocks. In decode each sequence has one
# or a few queries, and the kernel computes a whole block for each sequence, so small blocks are faster.
KEYS, FEWEST_QUERIES, TILE_QUERIES, MOST_QUERIES = 512, 32, 128, 512
MOST_ELEMENTS, MOST_SCORED = 1 << 19, 2048
"""Of more than a tile's queries in a block: elements of all heads, and queries of the heads that share a kv head."""
# The default (16 MiB on v5e) is too small for so many elements. Every TPU so far has at least 64 MiB.
VMEM_BYTES = 60 << 20


def unsupported(q, kv, *, page_table, first_key=0, **_):
    if kv.shape[2] == 1:
        return "its keys are its values"
    if first_key:
        return f"it hides the first {first_key} keys"
    if q.shape[3] % LANES:
        return f"heads have a size of {q.shape[3]}, not a multiple of {LANES}"
    entries, in_word = kv.shape[2], 4 // kv.dtype.itemsize
    if entries % in_word or not (entries // in_word in (1, 2, 4) or entries // in_word % 8 == 0):
        return f"{entries // 2} kv heads do not fill registers"
    if not _blocks_per_call(page_table):
        return f"a page table of {page_table.shape[1]} pages does not fit in {SCALAR_BYTES} bytes of scalar memory"
    return None


def _blocks_per_call(page_table):
    """Number of blocks whose page tables fit in scalar memory."""
    return SCALAR_BYTES // (4 * -(-page_table.shape[1] // LANES) * LANES)


def paged_attention(q, kv, *, positions, page_table, block_row, scale, first_key=0, window=None):
    """See `api.paged_attention`; a block's valid queries come first, at consecutive positions. So do those of the next
    block of its row, where blocks are tiles."""
    attend = functools.partial(_attend, kv, scale=scale, window=window)
    if q.shape[1] >= TILE_QUERIES and len(page_table) <= _blocks_per_call(page_table):
        return attend(q, positions, page_table.astype(jnp.int32), block_row)
    return in_calls(attend, q, positions, page_table, block_row)


def in_calls(attend, q, positions, page_table, block_row):
    """Returns `attend(q, positions, table)`, of blocks with a table each, in as few calls as scalar memory allows."""
    calls = -(-q.shape[0] // _blocks_per_call(page_table))
    size = -(-q.shape[0] // calls)
    parts = [slice(start, start + size) for start in range(0, q.shape[0], size)]
    outs = [attend(q[part], positions[part], page_table[block_row[part]].astype(jnp.int32)) for part in parts]
    return outs[0] if len(outs) == 1 else jax.tree.map(lambda *each: jnp.concatenate(each), *outs)


def _queries_at_once(q, kv, rows):
    """Returns the size of the kernel's blocks of queries. Blocks of more than one row compute all of it for each."""
    blocks, q_len, q_heads, head_dim = q.shape
    fits = min(MOST_ELEMENTS // (q_heads * head_dim), MOST_SCORED // (q_heads // (kv.shape[2] // 2)))
    most = max(TILE_QUERIES, min(MOST_QUERIES, fits, blocks * q_len // rows))
    most = 1 << most.bit_length() - 1 if q_len >= TILE_QUERIES else q_len
    return min(blocks * q_len, max(FEWEST_QUERIES, most))


def _attend(kv, q, positions, table, row=None, *, scale, window):
    """One call of the kernel. `row`: of each block, if blocks of a row are one sequence; the table is that row's."""
    blocks, q_len = positions.shape
    valid = positions >= 0
    count = valid.sum(axis=1, dtype=jnp.int32)
    keys = jnp.where(valid, positions + 1, 0).max(axis=1)
    # The kernel waits for a page of every sequence, and for a query at all: an empty block has one key, and the first
    # block one query. Their results are masked below. It would fetch a page of empty sequences at the end that nothing
    # waits for, so these are left out.
    count = count.at[0].max(1)
    ends = jnp.cumsum(count)
    starts = ends - count
    place = jnp.minimum(starts[:, None] + jnp.arange(q_len), blocks * q_len - 1)
    token = jnp.arange(blocks * q_len)
    block = jnp.minimum(jnp.searchsorted(ends, token, side="right"), blocks - 1)
    flat = q.reshape(blocks * q_len, *q.shape[2:])
    source = jnp.clip(block * q_len + token - starts[block], 0, blocks * q_len - 1)
    if row is not None:
        count = jax.ops.segment_sum(count, row, len(table), indices_are_sorted=True)
        keys = jax.ops.segment_max(keys, row, len(table), indices_are_sorted=True)
        ends = jnp.cumsum(count)
    used = jnp.where(count > 0, jnp.arange(1, 1 + len(count), dtype=jnp.int32), 0).max()
    out = ragged_paged_attention(
        flat[source],
        kv,
        jnp.maximum(keys, 1).astype(jnp.int32),
        table,
        jnp.append(0, ends).astype(jnp.int32),
        used[None],
        sm_scale=scale,
        sliding_window=window,
        # The kernel widens keys and values only where it is given a factor for them.
        **({"k_scale": 1.0, "v_scale": 1.0} if kv.dtype != q.dtype else {}),
        num_kv_pages_per_block=min(table.shape[1], max(1, KEYS // kv.shape[1])),
        num_queries_per_block=_queries_at_once(q, kv, len(table)),
        vmem_limit_bytes=VMEM_BYTES,
    )
    return jnp.where(valid[..., None, None], out[place], 0)
