"""Implementations of operations on CPU in which the bits of a token's result do not depend on the schedule.

A token's result has the same bits whatever the number of rows, tiles or steps in the call, its place among them, and
where its sequence was cut. Sums run in C++, in an order that is fixed for each row (`native/product.h`); XLA computes
only elementwise functions and maxima of integers. Recurrences run token by token in prefill as in decode. Weights and
activations are float32 or bfloat16, sums and states float32. Programs must be compiled with `COMPILER_OPTIONS`.

An engine with `schedule_invariant` names these implementations for all operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import dispatch, native
from kernels_pallas.slots import load, put, read_slots

NAME = "invariant"
F32 = jnp.float32
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
"""Otherwise a program may leave out a rounding to bfloat16 that another one does."""
_KEYS = 128
"""Keys per piece of attention. Pieces begin at multiples of it, or of a longer page."""
_LEAST_OUTPUTS = 4
"""With fewer, the C++ product copies the weight."""
WHY_MISSING = native.why_incomplete()
"""Why this installation cannot run them; None if it can."""


def implementation(run: Callable[..., Any]) -> dispatch.Implementation:
    """The entry of an operation's table; only a name chooses it."""
    return dispatch.Implementation(NAME, run, unsupported, "cpu", automatic=False)


def unsupported(*args: Any, **kwargs: Any) -> str | None:
    """Why a call is not supported, or None."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "dtype")]
    known = (F32, jnp.bfloat16)
    other = [leaf.dtype for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype not in known]
    return f"arrays are {other[0]}, not float32 or bfloat16" if other else WHY_MISSING


def scan(run: Callable[..., Any], *, wide: bool = False) -> dispatch.Implementation:
    """The entry of the automatic choice on CPU: token by token, with rows of a state in registers, a scan takes less
    time than as products of blocks. With `wide`, only where registers have 512 bits."""

    def unsupported_scan(*args: Any, **kwargs: Any) -> str | None:
        if args[-1].dtype != F32:
            return f"states are {args[-1].dtype}, not float32, and would be rounded after each token"
        if wide and not native.has_wide_registers():
            return f"registers are narrow (instruction set {native.instructions()})"
        return unsupported(*args)

    return dispatch.Implementation("native", run, unsupported_scan, "cpu")


def product(rows, weight):
    """rows [n, inputs] times the transpose of weight [outputs, inputs]; the order of a row's sums is fixed."""

    result = jax.ShapeDtypeStruct((len(rows), len(weight)), F32)
    return jax.ffi.ffi_call(native.target("linear"), result)(native.operand(rows, weight), weight)


def linear(x, weight, *, out_dtype):
    """See `linear.api.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    return product(rows, weight).astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def quantised_linear(x, weight, *, out_dtype):
    """See `linear.api.linear`. Integers with a scale for each channel are multiplied as they are."""
    result = product(x.reshape(-1, x.shape[-1]), _stored(weight, x.dtype))
    if weight.channel_scale is not None:
        result = rounded(result * weight.channel_scale.astype(F32))
    return result.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


def quantised_grouped_matmul(x, w, group_sizes):
    """See `grouped_matmul.api.grouped_matmul`; other weights than int8 by channel are widened, an expert at a time."""
    from kernels_pallas.grouped_matmul import quantised, quantised_native

    if _stored(w, x.dtype) is w.values:
        return rounded(quantised_native.grouped_matmul(x, w, group_sizes))

    def multiply(rows, one):
        return product(rows, one.widened(x.dtype))

    result = quantised.by_blocks(x, w, group_sizes, multiply)
    return rounded(quantised.by_channel(x, w, group_sizes, result))


def _stored(weight, dtype):
    """A quantised weight, without the scale of each channel, in a dtype that C++ products read."""
    by_channel = weight.group_scale is None and weight.group_zero is None
    return weight.values if by_channel and weight.values.dtype == jnp.int8 else weight.widened(dtype)


def rounded(x):
    """Returns a product as it is. If it is float32, no instruction can then compute it and a sum and round only once.

    The compiler contracts a product and a sum where it sees both, which depends on the program. It cannot look through
    an exclusive or with a value that is known only at run time to be 0.
    """
    if x.dtype != F32:  # the conversion between product and sum rounds
        return x
    zero = product(jnp.zeros((1, 1), F32), jnp.zeros((_LEAST_OUTPUTS, 1), F32))[0, 0]
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ lax.bitcast_convert_type(zero, jnp.uint32)
    return lax.bitcast_convert_type(bits, F32)


def elementwise(function, x):
    """One of exp, log, sigmoid, silu and softplus for each element, computed in float32 and rounded once to x's dtype.

    The compiler has forms of exp for some numbers of lanes. For others, such as the 12 numbers of two tokens with 6
    experts, it calls a library, which rounds in another way.
    """
    wide = x.astype(F32)
    result = jax.ShapeDtypeStruct(wide.shape, F32)
    return jax.ffi.ffi_call(native.target("elementwise"), result)(wide, function=function).astype(x.dtype)


def row_max(x):
    """The maximum over the last axis, which is kept; computed by the order of the bits.

    XLA:CPU gives a maximum of many floats to a library, with the functions around it, which that rounds in its own way.
    """
    bits = lax.bitcast_convert_type(x.astype(F32), jnp.int32)
    highest = _ordered(bits).max(-1, keepdims=True)
    return lax.bitcast_convert_type(_ordered(highest), F32)


def _ordered(bits):
    """Converts bits of float32 to integers of the same order, and back."""
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def quotient(x, total):
    """x / total [..., 1]. Of a single row the compiler would make a product with 1 / total."""
    return x / lax.optimization_barrier(jnp.broadcast_to(total, x.shape))


def row_sum(x):
    """The sum over the last axis, which is kept."""
    # Barriers here and below keep functions on both sides apart while the compiler rewrites them.
    rows = lax.optimization_barrier(x.reshape(-1, x.shape[-1]))
    return product(rows, jnp.ones((_LEAST_OUTPUTS, x.shape[-1]), F32))[:, :1].reshape(*x.shape[:-1], 1)


def ssd_scan(x, dt, a, b, c, d, store, **places):
    """See `ssd_scan.api.ssd_scan`."""
    return _scan_tiles(_ssd(a, d), (x, dt, b, c), (dt != 0).any(axis=2), store, **places)


def ssd_scan_sequence(x, dt, a, b, c, d, *, initial_state=None, chunk_size=128):
    """See `ssd_scan.api.ssd_scan_sequence`; `chunk_size` has no effect."""
    return _scan_sequences(_ssd(a, d), (x, dt, b, c), x, initial_state, (*x.shape[2:], b.shape[-1]))


def delta_scan(q, k, v, log_decay, beta, store, **places):
    """See `delta_scan.api.delta_scan`."""
    real = (beta != 0).any(axis=2)
    return _scan_tiles(delta_update, (q, k, v, log_decay, beta), real, store, **places)


def delta_scan_sequence(q, k, v, log_decay, beta, *, initial_state=None, chunk_size=64):
    """See `delta_scan.api.delta_scan_sequence`; `chunk_size` has no effect."""
    inputs = q, k, v, log_decay, beta
    return _scan_sequences(delta_update, inputs, v, initial_state, (*v.shape[2:], k.shape[-1]))


def delta_update(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """See `delta_update.api.delta_update`."""
    from kernels_pallas.delta_update import native as update

    return update.delta_update(q, k, v, log_decay, beta, store, read_slot=read_slot, write_slot=write_slot)


def selective_scan(x, dt, a, b, c, d, store, **places):
    """See `selective_scan.api.selective_scan`."""
    return _scan_tiles(_selective(a, d), (x, dt, b, c), (dt != 0).any(axis=2), store, **places)


def selective_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """See `selective_scan.api.selective_scan_sequence`."""
    return _scan_sequences(_selective(a, d), (x, dt, b, c), x, initial_state, a.shape)


def selective_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `selective_scan.api.selective_update`."""
    return _selective(a, d)(x, dt, b, c, store, read_slot=read_slot, write_slot=write_slot)


def _ssd(a, d):
    from kernels_pallas.state_update import native as update

    return lambda x, dt, b, c, store, **slots: update.state_update(x, dt, a, b, c, d, store, **slots)


def _selective(a, d):
    from kernels_pallas.selective_scan import native as update

    return lambda x, dt, b, c, store, **slots: update.selective_update(x, dt, a, b, c, d, store, **slots)


def _scan_tiles(update: Callable[..., Any], inputs: Sequence[Any], real, store, *, tile_first, read_slot, write_slot):
    """Runs the tiles through `update`, the operation of decode: its arguments are the inputs and a store.

    real [tiles, tile_size] is False for padding, which ends a tile. To C++, a negative slot to read means the state of
    the tile before.
    """
    last = jnp.maximum(real.sum(axis=1), 1) - 1
    write = jnp.where(jnp.arange(real.shape[1]) == last[:, None], write_slot[:, None], 0)
    return update(*inputs, store, read_slot=jnp.where(tile_first, read_slot, -1), write_slot=write)


def _scan_sequences(update: Callable[..., Any], inputs: Sequence[Any], y, initial_state, shape: tuple[int, ...]):
    """The same for whole sequences [batch, length, ...], from states [batch, *shape]; zeros if None."""
    batch, length = y.shape[:2]
    start = jnp.zeros((batch, *shape), F32) if initial_state is None else initial_state.astype(F32)
    rows = jnp.arange(1, batch + 1)
    write = jnp.where(jnp.arange(length) == length - 1, rows[:, None], 0)
    store = jnp.concatenate([jnp.zeros((1, *shape), F32), start])
    out, store = update(*inputs, store, read_slot=rows, write_slot=write)
    return out.astype(y.dtype), store[1:]


def paged_attention(q, kv, *, positions, page_table, block_row, scale, first_key=0, window=None):
    """See `paged_attention.api.paged_attention`: the online softmax of `paged_attention.xla`, with C++ products."""
    blocks, q_len, q_heads, head_dim = q.shape
    page_size, kv_heads = kv.shape[1], max(kv.shape[2] // 2, 1)
    repeats = q_heads // kv_heads
    pages = max(1, _KEYS // page_size)
    keys = pages * page_size
    queries = q.reshape(blocks, q_len, kv_heads, repeats, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(blocks, kv_heads, -1, head_dim)
    tables = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))[block_row]
    places = jnp.tile(positions, repeats)

    def block(b, out):
        q, place, table = load(queries, b), places[b], tables[b]

        def piece(i, carry):
            highest, total, out = carry
            entries = read_slots(kv, lax.dynamic_slice_in_dim(table, i * pages, pages))
            entries = entries.reshape(keys, -1, min(kv.shape[2], 2), kv.shape[3]).transpose(2, 1, 0, 3)
            key = i * keys + jnp.arange(keys)
            used = ((key >= first_key) & (key <= place.max()))[:, None]
            k, v = (jnp.where(used, one, 0).astype(q.dtype) for one in (entries[0], entries[-1]))
            seen = (key >= first_key) & (key <= place[:, None])
            if window is not None:
                seen &= key > place[:, None] - window
            heads = [_piece(highest[h], total[h], out[h], q[h], k[h], v[h], seen, scale) for h in range(kv_heads)]
            return tuple(jnp.stack(parts) for parts in zip(*heads, strict=True))

        start = jnp.full(q.shape[:-1], -jnp.inf, F32), jnp.zeros(q.shape[:-1], F32), jnp.zeros(q.shape, F32)
        _, total, sums = lax.fori_loop(0, (place.max(initial=-1) + keys) // keys, piece, start)
        return put(out, quotient(sums, jnp.where(total > 0, total, 1)[..., None]), b)

    out = lax.fori_loop(0, blocks, block, jnp.zeros(queries.shape, F32))
    out = out.reshape(blocks, kv_heads, -1, q_len, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)


def attention_sequence(q, k, v, *, scale, window=None):
    """See `paged_attention.api.attention_sequence`: the sequences become pages of a cache."""
    batch, length, _, head_dim = q.shape
    pages = -(-length // _KEYS)

    def cut(x):  # [batch, length, ...] -> [batch * pages, keys, ...]
        x = jnp.pad(x, ((0, 0), (0, pages * _KEYS - length), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch * pages, _KEYS, *x.shape[2:])

    entries = cut(jnp.stack([k, v], axis=3).reshape(batch, length, -1, head_dim))
    out = paged_attention(
        cut(q),
        jnp.pad(entries, ((1, 0), *[(0, 0)] * 3)),
        positions=jnp.tile(jnp.arange(pages * _KEYS).reshape(pages, _KEYS), (batch, 1)),
        page_table=jnp.arange(1, batch * pages + 1).reshape(batch, pages),
        block_row=jnp.repeat(jnp.arange(batch), pages),
        scale=scale,
        window=window,
    )
    return out.reshape(batch, pages * _KEYS, *q.shape[2:])[:, :length]


def _piece(highest, total, out, q, k, v, seen, scale):
    """An online softmax carried on over a piece of one head's keys: q [queries, head_dim], k and v [keys, head_dim]."""
    scores = jnp.where(seen, scale * product(q, k), -jnp.inf)
    higher = jnp.maximum(highest, row_max(scores)[..., 0])
    base = jnp.where(higher == -jnp.inf, 0, higher)
    weights, shrink = elementwise("exp", scores - base[..., None]), elementwise("exp", highest - base)
    # One more output, all ones, is the sum of the weights.
    values = product(weights.astype(v.dtype), jnp.concatenate([v, jnp.ones((v.shape[0], 1), v.dtype)], axis=1).T)
    return higher, rounded(total * shrink) + values[:, -1], rounded(out * shrink[..., None]) + values[:, :-1]
