"""Attention over a paged cache and over whole sequences. A cache is one array per attention layer, [pages, page_size,
2 * kv_heads, head_dim], with the key of head h at index 2h and its value at 2h + 1 (the layout of JAX's ragged paged
attention kernel). Query head i uses kv head i // (q_heads / kv_heads). Page 0 is null: its contents are undefined, and
it is never read or written. A cache may be narrower than the queries: keys and values are rounded once, when they are
written.

A cache with one entry for each token holds latents: all query heads share it, as key and as value ("DeepSeek-V2", 2024,
section 2.1.2, with the projections of keys and values absorbed into those of queries and of the output).
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.dispatch import differentiable
from kernels_pallas.fixed_order import F32, exp, quotient, rounded
from kernels_pallas.paged_attention import pallas_gpu, pallas_tpu, tpu_part, xla
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.slots import read_slots, write_one_by_one, write_slots

PAGED = (
    dispatch.Implementation("pallas_tpu", pallas_tpu.paged_attention, pallas_tpu.unsupported, platform="tpu"),
    *dispatch.kernels("gpu", pallas_gpu, "paged_attention"),
    *fixed_order.implementations(xla.paged_attention, xla.paged_attention),
    dispatch.Implementation("xla", xla.paged_attention),
)
PARTS = (
    *dispatch.kernels("tpu", tpu_part, "paged_attention_part"),
    *dispatch.kernels("gpu", pallas_gpu, "paged_attention_part"),
    *fixed_order.implementations(xla.paged_attention_part, xla.paged_attention_part),
    dispatch.Implementation("xla", xla.paged_attention_part),
)
SEQUENCE = (
    *fixed_order.implementations(xla.sequence_by_pages, xla.sequence_by_pages),
    dispatch.Implementation("xla", xla.attention_sequence),
)


@shapes_checked
def write_kv(
    kv: Float[Array, "pages page_size kv_entries head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"] | None,
    *,
    page: Int[Array, " tokens"],
    offset: Int[Array, " tokens"],
) -> Float[Array, "pages page_size kv_entries head_dim"]:
    """Writes each token's key and value at (page, offset); those for page 0 are dropped. Donate kv: updated in place.

    Numbers too large for a cache in 8 bits become the largest that it can hold. Of latents v is None, and k [tokens, 1,
    head_dim].
    """
    if kv.shape[2] != (1 if v is None else 2 * k.shape[1]):
        expected = "one entry, for latents" if v is None else f"keys and values of {k.shape[1]} heads"
        raise ValueError(f"write_kv: kv has shape {kv.shape}, expected {expected}")
    entries = k if v is None else lax.collapse(jnp.stack([k, v], axis=2), 1, 3)
    entries = _narrowed(entries, kv.dtype)
    return write_slots(kv, entries, jnp.where(page > 0, page * kv.shape[1] + offset, 0))


def _narrowed(x, dtype):
    """Converts x to the cache's dtype. Clips to the range of an 8-bit dtype, where larger numbers would become NaN."""
    if dtype.itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        x = jnp.clip(x, -most, most)
    return x.astype(dtype)


@shapes_checked
def copy_pages(
    kv: Shaped[Array, "pages page_size kv_entries head_dim"],
    *,
    source: Int[Array, " n"],
    target: Int[Array, " n"],
) -> Shaped[Array, "pages page_size kv_entries head_dim"]:
    """Copies whole pages; a pair with a 0 in it does nothing. All reads happen as if before all writes. Donate kv."""
    if not source.size:
        return kv
    # One call handles a layer's whole cache, which the compiler may divide over devices.
    target = jnp.where(source > 0, target, 0)
    read = functools.partial(read_slots, divided=True)

    def if_needed(kv, source, target):
        # Copies are rare, so this is a loop with one round or none (with `cond`, XLA:CPU would copy the cache). For a
        # scatter of whole pages, the TPU's compiler would copy the whole cache into another layout in every step.
        needed = (target > 0).any().astype(jnp.int32)
        return lax.fori_loop(0, needed, lambda _, kv: write_one_by_one(kv, read(kv, source), target), kv)

    def always(kv, source, target):
        # A GPU's loops and conditionals wait for the host, and copy the cache.
        return write_slots(kv, read(kv, source), target, divided=True)

    by_platform = functools.partial(lax.platform_dependent, cuda=always, rocm=always, default=if_needed)
    return differentiable(by_platform, always)(kv, source, target)


@shapes_checked
def paged_attention(
    q: Float[Array, "blocks q_len q_heads head_dim"],
    kv: Float[Array, "pages page_size kv_entries head_dim"],
    *,
    positions: Int[Array, "blocks q_len"],
    page_table: Int[Array, "rows pages_per_row"],
    block_row: Int[Array, " blocks"],
    scale: float,
    first_key: int = 0,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "blocks q_len q_heads head_dim"]:
    """Each query at position p attends to keys first_key..p of its block's row; softmax(scale * q k) in float32.

    With a window, only to the last `window` of them.

    The keys and values of this step are already in their pages.

    Args:
        q: queries in blocks of one row each; several blocks may belong to one row.
        positions: each query's position in its row, -1 for padding. A query that sees no key gives 0.
        page_table: page_table[row, i] holds the row's keys i * page_size onwards. Entries past a row's end are ignored.
        block_row: the row of each block.
        scale: factor on the scores.
        first_key: keys before it are hidden.
        window: number of keys that a query sees at most, its own included; None: all.
    Returns:
        The weighted values, in q's dtype.
    """
    if kv.shape[2] % 2 and kv.shape[2] != 1:
        raise ValueError(
            f"paged_attention: kv has shape {kv.shape}, expected an even number of keys and values, or one"
        )
    check_groups("paged_attention", q.shape[2], max(kv.shape[2] // 2, 1))
    if not q.size:
        return q
    return dispatch.call(
        "paged_attention", PAGED, implementation, q, kv, positions=positions, page_table=page_table,
        block_row=block_row, scale=scale, first_key=first_key, window=window,
    )  # fmt: skip


@shapes_checked
def paged_attention_part(
    q: Float[Array, "blocks q_len q_heads head_dim"],
    kv: Float[Array, "pages page_size kv_entries head_dim"],
    *,
    positions: Int[Array, "blocks q_len"],
    page_table: Int[Array, "rows pages_per_row"],
    block_row: Int[Array, " blocks"],
    first_page: Int[Array, ""],
    page_stride: int,
    scale: float,
    first_key: int = 0,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "blocks q_len q_heads head_dim"], Float[Array, "blocks q_len q_heads"]]:
    """As `paged_attention`, over a part of each row's pages; `merge_attention_parts` gives the attention to all.

    Args:
        page_table: page_table[row, i] is page `first_page + i * page_stride` of the row, counted from 0.
        first_page: less than `page_stride`.
    Returns:
        The weighted values in float32, and the logarithm of the sum of the exponentials of the scores: -inf, with
        values 0, for a query that sees no key of the part.
    """
    check_groups("paged_attention_part", q.shape[2], max(kv.shape[2] // 2, 1))
    if not q.size:
        return q.astype(jnp.float32), jnp.zeros(q.shape[:3], jnp.float32)
    return dispatch.call(
        "paged_attention_part", PARTS, implementation, q, kv, positions=positions, page_table=page_table,
        block_row=block_row, first_page=first_page, page_stride=page_stride, scale=scale, first_key=first_key,
        window=window,
    )  # fmt: skip


@shapes_checked
def merge_attention_parts(
    out: Float[Array, "members blocks q_len q_heads head_dim"], lse: Float[Array, "members blocks q_len q_heads"]
) -> Float[Array, "blocks q_len q_heads head_dim"]:
    """Merges results of `paged_attention_part`, added in the order of the parts, in float32. Without a key: 0."""
    highest = functools.reduce(jnp.maximum, lse)
    weights = exp(lse - jnp.where(highest == -jnp.inf, 0, highest))  # 0 where no part has a key: avoids inf - inf
    merged, total = jnp.zeros(out.shape[1:], F32), jnp.zeros(lse.shape[1:], F32)
    for part, weight in zip(out, weights, strict=True):
        merged, total = merged + rounded(weight[..., None] * part), total + weight
    return quotient(merged, jnp.where(total > 0, total, 1)[..., None])


@shapes_checked
def attention_sequence(
    q: Float[Array, "batch length q_heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch length q_heads head_dim"]:
    """Causal attention over whole sequences, without a cache; differentiable. Softmax in float32, output in q's dtype.

    With a window, a query sees only the last `window` keys, its own included.
    """
    check_groups("attention_sequence", q.shape[2], k.shape[2])
    if not q.size:
        return q
    return dispatch.call("attention_sequence", SEQUENCE, implementation, q, k, v, scale=scale, window=window)
