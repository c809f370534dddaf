"""The convolution of packed rows in C++, for CPU (`native/causal_conv1d.cc`): each input is read once.

XLA would compute a token's sums again for each place that reads them, one number at a time.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.causal_conv1d import xla
from kernels_pallas.slots import read_slots

F32 = jnp.float32


def unsupported(x, weight, bias, store, packed, *, activation):
    if x.dtype not in (F32, jnp.bfloat16):
        return f"x is {x.dtype}, not float32 or bfloat16"
    return native.WHY_MISSING


def causal_conv1d_prefill(x, weight, bias, store, packed, *, activation):

    def convolve(x, taps, bias, window, token_row, row_start, local):
        return _convolve(x, taps, bias, window, token_row, row_start, activation)

    return xla.prefill(convolve, x, weight, bias, store, packed)


def causal_conv1d_update(x, weight, bias, store, rows, *, activation):
    window = read_slots(store, rows.read_slot)
    _, store = xla.write_steps(window, x, store, rows.write_slot)
    return _convolve_rows(x, weight, bias, window, activation), store


def causal_conv1d_sequence(x, weight, bias, *, activation):
    """See `api.causal_conv1d_sequence`; without gradients."""
    window = jnp.zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]), x.dtype)
    return _convolve_rows(x, weight, bias, window, activation)


def _convolve_rows(x, weight, bias, window, activation):
    """Convolves rows [rows, length, channels] of equal length, each continuing from a window."""
    rows, length, channels = x.shape
    row = jnp.arange(rows)
    places = jnp.repeat(row, length), row * length
    return _convolve(x.reshape(-1, channels), weight.astype(F32).T, bias, window, *places, activation).reshape(x.shape)


def _convolve(x, taps, bias, window, token_row, row_start, activation):
    call = jax.ffi.ffi_call(native.target("causal_conv1d"), jax.ShapeDtypeStruct(x.shape, x.dtype))
    bias = jnp.zeros(x.shape[1], F32) if bias is None else bias.astype(F32)
    rows = (v.astype(jnp.int32) for v in (token_row, row_start))
    return call(x, taps, bias, window.astype(x.dtype), *rows, silu=activation == "silu")
