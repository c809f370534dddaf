"""The scan as one TPU kernel: a sequential grid over tiles, the state in VMEM from a row's first tile to its last.

The grid is that of `kernels_pallas.tpu_pipeline.scan`, with blocks of heads. A tile is processed in blocks of tokens by
matrix products (`xla`, `by_channel`; without erasing, and with one decay for each head, `tpu_tile`), of operands in the
value's dtype, summed in float32. The triangular system is float32, because its solution is fed back: the vector units
invert small systems on its diagonal, and each product with these and with the rest is three products of bfloat16
numbers, which together lose the last digits only (with float32 inputs, none).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_pipeline
from kernels_pallas.recurrence.scan.tpu_tile import scan_tile
from kernels_pallas.recurrence.update.pallas_tpu import unsupported
from kernels_pallas.tpu_blocks import F32, HeadBlocks, accurate_dot, blocks_in_lanes, dot

__all__ = ["scan", "unsupported"]

BLOCKS = (128, 64)  # tokens of a block: the first of these that divides the tile
BLOCKS_BY_CHANNEL = (64,)  # the work of decays by channel grows with the square
SYSTEM = 16  # a power of two: tokens of a triangular system that is inverted: fewer make products of too few rows
HEADS_TOGETHER = 16
VMEM_BYTES = 32 << 20  # of the v5e's 128 MiB: what is computed of several heads does not fit registers
BLOCK_BYTES = 1 << 20  # bytes of state in a grid step


def scan(entry, store, tiles, *, erase, skip, interpret=False):
    (count, size, heads, head_dim), (groups, state) = entry.value.shape, entry.key.shape[2:]
    blocks = blocks_in_lanes(heads, groups, head_dim, state, F32, block_bytes=BLOCK_BYTES)
    real, whole_tile = entry.real, not erase and not entry.by_channel
    tokens = size
    if not whole_tile:
        tokens = next((n for n in (BLOCKS_BY_CHANNEL if entry.by_channel else BLOCKS) if size % n == 0), size)

    def compute(_, inputs, y, carry, stored):
        if whole_tile:
            scan_tile(inputs, y, carry, stored, blocks=blocks, head_dim=head_dim)
            return
        scan_block = functools.partial(_scan_block_by_channel, erase=erase) if entry.by_channel else _scan_block
        for first in range(0, size, tokens):
            scan_block(inputs, y, carry, slice(first, first + tokens), blocks, head_dim)
        # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
        if stored != F32:
            carry[...] = carry[...].astype(stored).astype(F32)

    def per_head(width):
        return pl.BlockSpec((1, size, blocks.heads * width), lambda h, i, *_: (i, 0, h))

    # Padding may hold NaN, and 0 * NaN is NaN: values are masked as well as strengths. `scan_tile` masks what it reads.
    masked = entry._replace(log_decay=entry.masked().log_decay) if whole_tile else entry.masked()
    query, key, value, logs, strength = (v.reshape(count, size, -1) for v in masked)
    row_of_tokens = pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0))
    per_group = pl.BlockSpec((1, size, blocks.groups * state), lambda h, i, *_: (i, 0, blocks.block_of_groups(h)))
    logs, strength = logs.astype(F32), strength.astype(F32)
    inputs = [
        (query, per_group),
        (key, per_group),
        (value, per_head(head_dim)),
        (logs, per_head(state)) if entry.by_channel else (logs.swapaxes(1, 2), row_of_tokens),
        (strength.swapaxes(1, 2), row_of_tokens),
    ]
    if whole_tile:
        weight = jnp.zeros(heads) if skip is None else skip
        of_block = pl.BlockSpec((1, blocks.heads * head_dim), lambda h, i, *_: (0, h))
        inputs += [
            (jnp.repeat(weight.astype(F32), head_dim)[None], of_block),
            (real.astype(F32)[:, None], pl.BlockSpec((1, 1, size), lambda h, i, *_: (i, 0, 0))),
        ]
    y, store = tpu_pipeline.scan(
        compute, inputs, (jax.ShapeDtypeStruct((count, size, heads * head_dim), value.dtype), per_head(head_dim)),
        store, tiles, real=real, block=(blocks.heads, head_dim, state), vmem_bytes=None if whole_tile else VMEM_BYTES,
        cost=_cost(entry, store, blocks, tokens, erase), interpret=interpret, name="recurrence_scan",
    )  # fmt: skip
    return y.reshape(entry.value.shape), store


def _scan_block(inputs, y, carry, tokens: slice, blocks: HeadBlocks, head_dim: int):
    """Scans some tokens of a tile: writes y [1, size, heads * head_dim], updates `carry` [heads, head_dim, state].

    Stage by stage for a few heads, because the compiler keeps products in the order of the code: the products of one
    head then do not wait for each other.
    """
    (q, k, v, log_decay, beta), size, state = inputs, tokens.stop - tokens.start, carry.shape[2]
    product, exact = functools.partial(dot, dtype=v.dtype), functools.partial(dot, dtype=F32)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    # Inclusive sums over tokens, [heads, size]: the log of the decay from the block's start. A product: Mosaic has no
    # running sums.
    decay_rows = exact(log_decay[0, :, tokens], (row <= column).astype(F32), (1, 0))
    last = decay_rows[:, size - 1 :]
    decay, share, to_end = decay_rows.T, beta[0, :, tokens].T, jnp.exp(last - decay_rows)
    above_diagonal = jnp.where(row >= column, 0.0, -jnp.inf)
    repeats = blocks.heads // blocks.groups

    def of_group(head):
        return slice(head // repeats * state, (head // repeats + 1) * state)

    for first in range(0, blocks.heads, HEADS_TOGETHER):
        together = range(first, min(first + HEADS_TOGETHER, blocks.heads))
        below, scores = [], []
        for head in together:
            here = slice(head, head + 1)
            if head == first or head % repeats == 0:
                qt, kt = (one[0, tokens, of_group(head)] for one in (q, k))
                of_keys, of_queries = product(kt, kt, (1, 1)), product(qt, kt, (1, 1))
            # Masked before exp: above the diagonal it could overflow.
            between = jnp.exp(decay[:, here] - decay_rows[here] + above_diagonal)
            below.append(jnp.where(row > column, of_keys * between * share[:, here], 0))
            scores.append((of_queries * between).astype(v.dtype))
        inverses = _inverses_of_diagonal_blocks(below)
        from_state = []
        for head in together:
            asked = jnp.concatenate([one[0, tokens, of_group(head)] for one in (k, q)])
            from_state.append(product(asked, carry[head], (1, 1)))
        errors = []
        for head, found in zip(together, from_state, strict=True):
            here, lanes = slice(head, head + 1), slice(head * head_dim, (head + 1) * head_dim)
            error = v[0, tokens, lanes].astype(F32) - jnp.exp(decay[:, here]) * found[:size]
            errors.append(share[:, here] * error)
        u = _solve(below, inverses, errors, v.dtype)
        for i, head in enumerate(together):
            here, lanes = slice(head, head + 1), slice(head * head_dim, (head + 1) * head_dim)
            out = jnp.exp(decay[:, here]) * from_state[i][size:] + product(scores[i], u[i], (1, 0))
            y[0, tokens, lanes] = out.astype(y.dtype)
            added = product(u[i].T * to_end[here], k[0, tokens, of_group(head)], (1, 0))
            carry[head] = carry[head] * jnp.exp(last[here]) + added


def _solve(below, inverses, errors, dtype):
    """Solves (I + below) u = error for strictly lower triangular matrices, of each head one after the other.

    `inverses` are those of small systems on the diagonal. What their solutions add to later rows is taken off these by
    halves: of all rows, of each half, and so on.
    """
    size = errors[0].shape[0]
    few = inverses[0].shape[0]
    left = [[error[start : start + few] for start in range(0, size, few)] for error in errors]
    u: list[list[jax.Array]] = [[] for _ in errors]
    for first, middle, end in _substitutions(0, size // few):
        rows, columns = slice(middle * few, end * few), slice(first * few, middle * few)
        for i in range(len(errors)):
            if middle == first:
                u[i].append(accurate_dot(inverses[i][:, rows], left[i][first], dtype))
                continue
            known = accurate_dot(below[i][rows, columns], jnp.concatenate(u[i][first:]), dtype)
            for block in range(middle, end):
                offset = (block - middle) * few
                left[i][block] -= known[offset : offset + few]
    return [jnp.concatenate(one) for one in u]


def _substitutions(first: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the steps that solve the systems first..end, as (first, middle, end).

    Where middle is first, one system is solved; else the solutions of systems first..middle are taken off middle..end.
    """
    if end - first == 1:
        return [(first, first, end)]
    middle = (first + end + 1) // 2
    return [*_substitutions(first, middle), (first, middle, end), *_substitutions(middle, end)]


def _inverses_of_diagonal_blocks(matrices):
    """Inverts I + each block of a few rows and columns on the diagonals of strictly lower triangular matrices.

    By elimination on the vector units, of all blocks at once. The blocks of a matrix lie next to each other in lanes,
    [few, size], in the result as well.
    """
    size = matrices[0].shape[0]
    few = math.gcd(size, SYSTEM)
    row, lane = (lax.broadcasted_iota(jnp.int32, (few, size), axis) for axis in (0, 1))
    block = lax.div(lane, few)
    below = []
    for matrix in matrices:
        side_by_side = matrix[:few]
        for start in range(few, size, few):
            side_by_side = jnp.where(block == start // few, matrix[start : start + few], side_by_side)
        below.append(side_by_side)
    inverses = [jnp.where(row == lane - block * few, 1.0, 0.0)] * len(matrices)
    for j in range(few - 1):
        done = j // 8 * 8  # whole registers of rows that do not change any more
        column = (block * few + j)[done:]
        for i, inverse in enumerate(inverses):
            of_column = jnp.take_along_axis(below[i][done:], column, axis=1, mode="promise_in_bounds")
            rest = inverse[done:] - of_column * inverse[j : j + 1]
            inverses[i] = jnp.concatenate([inverse[:done], rest]) if done else rest
    return inverses


def _scan_block_by_channel(inputs, y, carry, tokens: slice, blocks: HeadBlocks, head_dim: int, *, erase: bool):
    """Does the same as `_scan_block` with log_decay [1, size, heads * state]."""
    (q, k, v, log_decay, beta), size, state = inputs, tokens.stop - tokens.start, carry.shape[2]
    product, exact = functools.partial(dot, dtype=v.dtype), functools.partial(dot, dtype=F32)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    shares = beta[0, :, tokens].T
    for group in range(blocks.groups):
        lanes = slice(group * state, (group + 1) * state)
        qt, kt = (one[0, tokens, lanes].astype(F32) for one in (q, k))
        for head in range(blocks.heads)[blocks.heads_of(group)]:
            lanes, share = slice(head * head_dim, (head + 1) * head_dim), shares[:, head : head + 1]
            log_decays = log_decay[0, tokens, head * state : (head + 1) * state]
            keys, scores, since, until = _decayed_products(qt, kt, log_decays, product, exact)
            scores += jnp.where(row == column, jnp.sum(qt * kt, axis=1, keepdims=True), 0)
            old, from_start = carry[head], jnp.exp(since)
            u = share * v[0, tokens, lanes].astype(F32)
            if erase:
                below, error = [keys * share], u - share * product(from_start * kt, old, (1, 1))
                (u,) = _solve(below, _inverses_of_diagonal_blocks(below), [error], v.dtype)
            out = product(from_start * qt, old, (1, 1)) + product(scores, u, (1, 0))
            y[0, tokens, lanes] = out.astype(y.dtype)
            carry[head] = old * from_start[size - 1 :] + product(u.T, jnp.exp(until) * kt, (1, 0))


def _decayed_products(q, k, log_decay, product, exact):
    """Returns `by_channel.decayed_products` [size, size] of keys and of queries, and the sums of log decays.

    Masks select halves and products sum over them, because slices of few rows are not whole registers.
    """
    size = k.shape[0]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    differ, token = row ^ column, lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    since, until = log_decay, jnp.zeros_like(log_decay)
    keys = scores = jnp.zeros((size, size), F32)
    half = 1
    while half < size:
        second, together = (token & half) != 0, differ < 2 * half
        decay = jnp.exp(jnp.where(second, since, until))
        early = jnp.where(second, 0, decay * k)
        keys += jnp.where(together, product(jnp.where(second, decay * k, 0), early, (1, 1)), 0)
        scores += jnp.where(together, product(jnp.where(second, decay * q, 0), early, (1, 1)), 0)
        other_half = exact((together & (differ >= half)).astype(F32), log_decay, (1, 0))
        since, until = since + jnp.where(second, other_half, 0), until + jnp.where(second, 0, other_half)
        half *= 2
    return keys, scores, since, until


def _cost(entry, store, blocks: HeadBlocks, block: int, erase: bool) -> pl.CostEstimate:
    (tiles, size, heads, head_dim), state = entry.value.shape, entry.key.shape[3]
    tokens, head_state = tiles * size, head_dim * state
    per_block = 3 * head_dim + state if erase else head_dim + state // blocks.repeats
    flops = 2 * tokens * heads * (block * per_block + (3 if erase else 2) * head_state)
    transcendentals, decays = tokens * heads * block, entry.log_decay.size // tokens
    if entry.by_channel:
        levels = (block - 1).bit_length()
        flops += 2 * tokens * heads * levels * block * 3 * state
        transcendentals = tokens * decays * (levels + 2)
    per_token = 2 * heads * head_dim * entry.value.dtype.itemsize + 4 * heads + 4 * decays
    per_token += 2 * blocks.count * blocks.groups * state * entry.key.dtype.itemsize
    return pl.CostEstimate(
        flops=flops,
        transcendentals=transcendentals,
        # Assumes that every tile writes a state; most do not, but at least one row is read and one written.
        bytes_accessed=tokens * per_token + 2 * tiles * heads * head_state * store.dtype.itemsize,
    )
