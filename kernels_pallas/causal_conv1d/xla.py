"""The convolution in plain JAX: a sum of shifted inputs, with a correction at the first tokens of each row."""

from functools import partial

import jax.numpy as jnp
from jax import lax

from kernels_pallas.fixed_order import F32, rounded, silu
from kernels_pallas.slots import read_slots, write_slots
from kernels_pallas.windows import read_windows, write_windows


def _shifted(x, by, axis):
    """x moved along an axis, zeros in front. One padding per shift, because a shared one would be held in memory."""
    length = x.shape[axis]
    padding = [(min(by, length), 0) if n == axis else (0, 0) for n in range(x.ndim)]
    return lax.slice_in_dim(jnp.pad(x, padding), 0, length, axis=axis)


def _finish(total, bias, activation, dtype):
    total = total if bias is None else total + bias.astype(F32)
    return (silu(total) if activation == "silu" else total).astype(dtype)


def causal_conv1d_prefill(x, weight, bias, store, packed, *, activation):
    return prefill(partial(_convolve, activation=activation), x, weight, bias, store, packed)


def prefill(convolve, x, weight, bias, store, packed):
    """Prefill by `convolve`: of x, taps, bias, windows, each token's row, each row's start, and indices in the rows."""
    window, token_row, row_start = read_slots(store, packed.read_slot), packed.token_row, packed.row_start
    local = jnp.arange(x.shape[0]) - row_start[token_row]  # index within the row
    y = convolve(x, weight.astype(F32).T, bias, window, token_row, row_start, local)
    ends = windows_of_tiles(lambda index: x[index].astype(store.dtype), window, packed)
    return y, write_slots(store, ends, packed.tiles.write_slot)


def windows_of_tiles(inputs, window, packed):
    """Returns the window at the end of each tile [tiles, n, channels].

    Args:
        inputs: gives packed tokens [tiles, n, channels] by their numbers [tiles, n].
        window: [rows, n, channels], that of each row before its first token.
    """
    keep, tokens, tile_row = window.shape[1], len(packed.token_row), packed.tile_row
    # [tiles, width-1], indices within the row; negative ones lie in the old window.
    position = packed.tile_end[:, None] - keep + jnp.arange(keep)
    recent = inputs(jnp.clip(packed.row_start[tile_row][:, None] + position, 0, max(tokens - 1, 0)))
    older = window[tile_row[:, None], jnp.clip(position + keep, 0, max(keep - 1, 0))]
    return jnp.where((position >= 0)[..., None], recent, older)


def _convolve(x, taps, bias, window, token_row, row_start, local, *, activation):
    """y [tokens, channels]: a token sees its row's tokens to the left, and before them the row's window.

    Accelerators would hold the window's part for all tokens in memory: therefore without it, and then the rows' first
    tokens once more.
    """
    tokens, keep = x.shape[0], window.shape[1]
    y = _finish(_within(x, taps, local), bias, activation, x.dtype)
    if keep:
        first = row_start[:, None] + jnp.arange(keep)  # [rows, width-1]
        inside = jnp.minimum(first, tokens - 1)
        own = (first < tokens) & (token_row[inside] == jnp.arange(len(row_start))[:, None])
        seen = jnp.concatenate([window.astype(F32), x[inside].astype(F32)], axis=1)
        again = sum(rounded(taps[i] * seen[:, i : i + keep]) for i in range(keep + 1))
        again = _finish(again, bias, activation, x.dtype)
        y = y.at[jnp.where(own, first, tokens)].set(again, mode="drop")
    return y


def _within(x, taps, local):
    """Returns the sum over tokens of the row in this call."""
    keep, total = len(taps) - 1, jnp.zeros((), F32)
    for i in range(keep + 1):
        # A select, not a product: the token to the left may be another row's, or padding.
        seen = jnp.where((local >= keep - i)[:, None], _shifted(x, keep - i, axis=0).astype(F32), 0)
        total += rounded(taps[i] * seen)
    return total


def causal_conv1d_update(x, weight, bias, store, rows, *, activation):
    """See `api.causal_conv1d_update`. The target platform of compilation selects the form."""
    cpu, default = (partial(form, activation=activation) for form in (_update_by_rows, _update_by_inputs))
    return lax.platform_dependent(x, weight, bias, store, rows, cpu=cpu, default=default)


def _update_by_rows(x, weight, bias, store, rows, *, activation):
    """Returns all inputs of a row in one array [rows, width-1+steps, channels]."""
    steps, taps = x.shape[1], weight.astype(F32).T
    inputs, store = write_steps(read_slots(store, rows.read_slot), x, store, rows.write_slot)
    total = sum(rounded(taps[i] * inputs[:, i : i + steps].astype(F32)) for i in range(len(taps)))
    return _finish(total, bias, activation, x.dtype), store


def write_steps(window, x, store, write_slot):
    """Returns inputs [rows, width-1+steps, channels], windows first, and the store with a window for each step."""
    (rows, steps, channels), keep = x.shape, window.shape[1]
    inputs = jnp.concatenate([window, x.astype(store.dtype)], axis=1)
    ends = jnp.stack([inputs[:, t + 1 : t + 1 + keep] for t in range(steps)], axis=1)
    return inputs, write_slots(store, ends.reshape(rows * steps, keep, channels), write_slot.reshape(-1))


def _update_by_inputs(x, weight, bias, store, rows, *, activation):
    """The form for platforms other than CPU: an array [rows, channels] for each input.

    On TPU, that takes half the time of arrays whose last axis but one is a few steps (by its compiler's estimate, at 64
    rows and 4 steps of 8192 channels).
    """
    steps = x.shape[1]
    keep, taps = weight.shape[1] - 1, weight.astype(F32).T
    # Held as it was read: XLA for GPU would read anew in each use, also after the write, and copy the store for that.
    window = lax.optimization_barrier(read_windows(store, rows.read_slot))
    inputs = [window[:, i] for i in range(keep)] + [x[:, t].astype(store.dtype) for t in range(steps)]
    totals = [sum(rounded(taps[i] * inputs[t + i].astype(F32)) for i in range(keep + 1)) for t in range(steps)]
    y = jnp.stack([_finish(total, bias, activation, x.dtype) for total in totals], axis=1)
    if keep:
        # One write for all steps: between several, XLA may want the store in another layout, and copy it.
        entries = [jnp.concatenate(inputs[1 + i : 1 + i + steps]) for i in range(keep)]
        store = write_windows(store, jnp.stack(entries, axis=1), rows.write_slot.T.reshape(-1))
    return y, store


def causal_conv1d_sequence(x, weight, bias, *, activation):
    keep, taps = weight.shape[1] - 1, weight.astype(F32).T
    total = sum(rounded(taps[i] * _shifted(x, keep - i, axis=1).astype(F32)) for i in range(keep + 1))
    return _finish(total, bias, activation, x.dtype)
