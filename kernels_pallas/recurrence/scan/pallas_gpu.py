"""The scan as two Triton kernels (see `kernels_pallas.recurrence.scan.xla` for the mathematics).

Without erasing, and with one decay for each head, tiles are independent but for the states between them, and run in
parallel (`gpu_tiles`). The rest of this text is about the other recurrences.

A tile is processed in blocks of `TOKENS` tokens. The first kernel computes what does not depend on the state, for all
blocks and heads in parallel: the inverse of the triangular system and the scores of queries with keys. The second
kernel processes the tiles of a row in order, with some channels of one head's state in registers, and writes the state
after each tile with a write slot. Products of inputs and states take operands in the value's dtype and sum in float32;
the triangular system is float32 throughout, because its solution is fed back. Keys whose size is not a power of two are
divided into pieces.

Where every channel of a key has its own decay, the first kernel sums products over pieces of increasing size
(`by_channel`), and also stores the decayed queries and keys that the second one multiplies by states.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import triton_blocks as triton
from kernels_pallas.recurrence.scan import gpu_tiles
from kernels_pallas.recurrence.scan.inverse import unit_lower_inverse

F32 = jnp.float32
TOKENS = 32  # of a tile in one triangular system, at most
OWN_DECAYS = 16  # of the channels of keys that decay on their own, in one program at once


def unsupported(entry, store, tiles, *, erase, skip):
    if triton.offsets_overflow(store):
        return "offsets into the store do not fit in 32 bits"
    for what, size in (("tiles", entry.value.shape[1]), ("heads", entry.value.shape[3]), ("keys", entry.key.shape[3])):
        if size % triton.LEAST:
            return f"{what} have a size of {size}, not a multiple of {triton.LEAST}"
    return None


def scan(entry, store, tiles, *, erase, skip, interpret=False):
    parallel = not erase and not entry.by_channel and triton.is_power_of_two(entry.key.shape[3])
    form = gpu_tiles.scan if parallel else functools.partial(along_rows, erase=erase)
    return form(entry, store, tiles, skip=skip, interpret=interpret)


def along_rows(entry, store, tiles, *, erase, skip, interpret):
    """Scans the tiles of a row one after the other."""
    count_of_tiles, size, heads, head_dim = entry.value.shape
    block, part = triton.power_of_two_in(size, TOKENS), triton.power_of_two_in(head_dim, triton.CHANNELS)
    count, repeats, by_channel = count_of_tiles * size // block, entry.repeats, entry.by_channel
    # Whether a token is real depends on all heads, but a program sees only one.
    numbers = entry.real, *entry._replace(log_decay=entry.masked().log_decay)
    real, q, k, v, log_decay, beta = (one.reshape(count, block, *one.shape[2:]) for one in numbers)
    beta = beta.astype(F32).swapaxes(1, 2)
    decay = jnp.cumsum(log_decay.astype(F32), axis=1)  # the log of the decay from a block's start
    if not by_channel:
        decay = decay.swapaxes(1, 2)
    call = functools.partial(
        pl.pallas_call, compiler_params=plt.CompilerParams(num_warps=4, num_stages=1), interpret=interpret
    )
    square, wide = (count, heads, block, block), (count, heads, block, k.shape[3])
    between = [jax.ShapeDtypeStruct(square, F32), jax.ShapeDtypeStruct(square, v.dtype)]
    if by_channel:
        between += [jax.ShapeDtypeStruct((count, heads, k.shape[3]), F32)] + [jax.ShapeDtypeStruct(wide, v.dtype)] * 3
    options = {"repeats": repeats, "tensor_cores": not interpret, "erase": erase}
    solution, scores, *decayed = call(
        functools.partial(_systems_by_channel if by_channel else _systems, **options),
        grid=(heads, count),
        out_shape=between,
        name="recurrence_scan_systems",
    )(real, q, k, decay, beta)
    operands = decayed if by_channel else [decay, q, k, k]

    # The first tile has no previous tile: unless it begins a row, it starts from zeros.
    first, number = tiles.first.at[0].set(True), jnp.arange(count_of_tiles, dtype=jnp.int32)
    next_first = jnp.append(jnp.where(first, number, count_of_tiles)[1:], jnp.int32(count_of_tiles))
    following = lax.cummin(next_first, reverse=True)
    # The last tile of the row that begins with each tile. Programs of tiles that begin no row end at once.
    places = jnp.where(first, following, 0), jnp.where(tiles.first, tiles.read_slot, 0), tiles.write_slot
    y, store = call(
        functools.partial(_along_rows, blocks=size // block, part=part, by_channel=by_channel, **options),
        grid=(heads, head_dim // part, count_of_tiles),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={11 + (skip is not None): 1},
        name="recurrence_scan_along_rows",
    )(*(v.astype(jnp.int32) for v in places), real, v, solution, scores, *operands, skip, store)
    return y.reshape(entry.value.shape), store


def _systems(real, q, k, decay, beta, solution, scores, *, repeats: int, tensor_cores: bool, erase: bool):
    """Computes the interactions of a block's tokens. `solution` [size, size] times the prediction errors of the state
    gives what the tokens add; `scores` [size, size] times these additions gives their part of the outputs.
    """
    head, block = pl.program_id(0), pl.program_id(1)
    size, group = decay.shape[2], lax.div(head, repeats)
    product, exact = (functools.partial(triton.dot, dtype=t, tensor_cores=tensor_cores) for t in (scores.dtype, F32))
    queries, keys = (_of_group(one, real, block, group) for one in (q, k))
    sums, share = plt.load(decay.at[block, head, :]), plt.load(beta.at[block, head, :])
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    # Masked before exp: above the diagonal it could overflow.
    within = jnp.exp(jnp.where(row >= column, sums[:, None] - sums[None, :], -jnp.inf))
    seen = sum(product(query, key.T) for query, key in zip(queries, keys, strict=True))
    plt.store(scores.at[block, head, :, :], (seen * within).astype(scores.dtype))
    alike = sum(product(key, key.T) for key in keys) if erase else 0.0
    below = jnp.where(row > column, alike * within * share[:, None], 0.0)
    plt.store(solution.at[block, head, :, :], unit_lower_inverse(below, exact) * share[None, :])


def _systems_by_channel(
    real, q, k, decay, beta, solution, scores, whole, from_start_q, from_start_k, to_end_k, *, repeats: int,
    tensor_cores: bool, erase: bool,
):  # fmt: skip
    """Computes `_systems`, the decay of a whole block, queries and keys decayed from the block's start, and keys
    decayed to its end.
    """
    head, block = pl.program_id(0), pl.program_id(1)
    size, state, group = scores.shape[2], k.shape[3], lax.div(head, repeats)
    product, exact = (functools.partial(triton.dot, dtype=t, tensor_cores=tensor_cores) for t in (scores.dtype, F32))
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    token, differ, live = lax.iota(jnp.int32, size), row ^ column, plt.load(real.at[block, :])[:, None]
    width = triton.power_of_two_in(state, OWN_DECAYS)

    def add_channels(i, carry):
        seen, alike = carry
        n, channel = pl.ds(i * width, width), i * width + lax.iota(jnp.int32, width)
        query, key = (triton.load_if(live, one.at[block, :, group, n], size, width).astype(F32) for one in (q, k))
        sums, last = (plt.load(decay.at[block, at, head, n]) for at in (slice(None), jnp.int32(size - 1)))
        plt.store(whole.at[block, head, n], jnp.exp(last))
        from_start, to_end = jnp.exp(sums), jnp.exp(last[None, :] - sums)
        for target, value in (
            (from_start_q, query * from_start), (from_start_k, key * from_start), (to_end_k, key * to_end)
        ):  # fmt: skip
            plt.store(target.at[block, head, :, n], value.astype(target.dtype))
        seen += jnp.where(differ == 0, product(query, key.T), 0.0)
        half = 1
        while half < size:
            # Pairs of which one token is in the first half of a piece, and the later one in the second: the decay
            # between them is that from each to the end of the first half.
            middle = (token & -(2 * half)) + half - 1
            near = jnp.exp(-jnp.abs(sums - plt.load(decay.at[block, middle[:, None], head, channel[None, :]])))
            pairs = (row > column) & (differ >= half) & (differ < 2 * half)
            seen += jnp.where(pairs, product(query * near, (key * near).T), 0.0)
            if erase:
                alike += jnp.where(pairs, product(key * near, (key * near).T), 0.0)
            half *= 2
        return seen, alike

    nothing = jnp.zeros((size, size), F32)
    seen, alike = lax.fori_loop(0, state // width, add_channels, (nothing, nothing))
    share = plt.load(beta.at[block, head, :])
    plt.store(scores.at[block, head, :, :], seen.astype(scores.dtype))
    plt.store(solution.at[block, head, :, :], unit_lower_inverse(alike * share[:, None], exact) * share[None, :])


def _along_rows(
    ends, read_slot, write_slot, real, v, solution, scores, decay, q, k, to_end_k, skip, store_in, y, store_out, *,
    blocks: int, part: int, repeats: int, tensor_cores: bool, by_channel: bool, erase: bool,
):  # fmt: skip
    head, channels, begin = (pl.program_id(axis) for axis in range(3))
    size, group = scores.shape[2], lax.div(head, repeats)
    here, inner = pl.ds(channels * part, part), triton.pieces(store_in.shape[3])
    product, exact = (functools.partial(triton.dot, dtype=t, tensor_cores=tensor_cores) for t in (v.dtype, F32))

    def operands(block):
        """Returns queries and keys, keys for the state, and the decays that they have not been multiplied by: from the
        block's start, to its end, and of the whole block.
        """
        if by_channel:
            vectors = ([plt.load(one.at[block, head, :, n]) for n in inner] for one in (q, k, to_end_k))
            return *vectors, 1.0, 1.0, [plt.load(decay.at[block, head, n])[None, :] for n in inner]
        queries, keys = (_of_group(one, real, block, group) for one in (q, k))
        sums, last = plt.load(decay.at[block, head, :]), plt.load(decay.at[block, head, jnp.int32(size - 1)])
        from_start, to_end = jnp.exp(sums)[:, None], jnp.exp(last - sums)[:, None]
        return queries, keys, keys, from_start, to_end, [jnp.exp(last)] * len(inner)

    def one_block(block, state):
        queries, keys, late_keys, from_start, to_end, whole = operands(block)
        live = plt.load(real.at[block, :])[:, None]
        values = triton.load_if(live, v.at[block, :, head, here], size, part).astype(F32)

        def read(vectors):
            return from_start * sum(product(one, piece.T) for one, piece in zip(vectors, state, strict=True))

        added = exact(plt.load(solution.at[block, head, :, :]), values - read(keys) if erase else values)
        out = read(queries) + product(plt.load(scores.at[block, head, :, :]), added)
        out += 0.0 if skip is None else plt.load(skip.at[head]).astype(F32) * values
        plt.store(y.at[block, :, head, here], out.astype(y.dtype))
        left = (added * to_end).T
        return [piece * decay + product(left, key) for piece, decay, key in zip(state, whole, late_keys, strict=True)]

    def one_tile(tile, state):
        for place in range(blocks):
            state = one_block(tile * blocks + place, state)
        # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
        stored = [piece.astype(store_out.dtype) for piece in state]
        target = plt.load(write_slot.at[tile])
        for n, piece in zip(inner, stored, strict=True):
            triton.store_if(target > 0, store_out.at[target, head, here, n], piece)
        return [piece.astype(F32) for piece in stored]

    source = plt.load(read_slot.at[begin])
    state = [triton.load_if(source > 0, store_in.at[source, head, here, n], part, n.size).astype(F32) for n in inner]
    lax.fori_loop(begin, plt.load(ends.at[begin]), one_tile, state)


def _of_group(v, real, block, group):
    """Loads queries or keys of a block's tokens in pieces, each [size, width]."""
    # Padding may hold NaN, and 0 * NaN is NaN: its values are masked.
    live = plt.load(real.at[block, :])[:, None]
    return [triton.load_if(live, v.at[block, :, group, n], v.shape[1], n.size) for n in triton.pieces(v.shape[3])]
