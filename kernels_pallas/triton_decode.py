"""What the Triton kernels of a recurrent layer's decode share: channels of a convolution, and the gated norm after it.

A layer's first kernel convolves and updates the states (`gated_update.pallas_gpu`, `gated_delta_update.pallas_gpu`).
The second one is here. It writes the windows that programs of several heads read in the first one.

Both read one array with all of the projections' outputs: XLA writes it as one kernel, or not at all where the merged
product already has it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.triton_blocks import load_if, padded, pieces, store_if

F32 = jnp.float32
NUMBERS = 4096  # of a state in one program, at most: a thread holds 32 of them


class Channels:
    """Some channels of a convolution, inside a kernel: where they are, and their taps."""

    def __init__(self, windows, first, projected, count, dtype, weight=None, bias=None):
        """`first`: their index in windows and taps; `projected`: in the projections' outputs."""
        self.windows, self.count, self.dtype = windows, count, dtype
        self.here, self.projected = pl.ds(first, count), pl.ds(projected, count)
        self.bias = 0 if bias is None else plt.load(bias.at[self.here]).astype(F32)
        if weight is not None:
            self.taps = [plt.load(weight.at[self.here, i]).astype(F32) for i in indices(weight.shape[1])]

    def window(self, slot):
        """Returns the inputs in a slot, oldest first."""
        width = self.windows.shape[1]
        return [load_if(slot > 0, self.windows.at[slot, i, self.here], self.count) for i in indices(width)]

    def input(self, projected, row, t, live):
        """Returns a token's input as a window holds it; zeros for padding, which may hold NaN."""
        value = load_if(live, projected.at[row, t, self.projected], self.count)
        return value.astype(self.dtype).astype(self.windows.dtype)

    def convolved(self, inputs):
        """Returns silu(bias + the sum over taps), rounded to the dtype of activations, in float32."""
        total = sum(tap * one.astype(F32) for tap, one in zip(self.taps, inputs, strict=True)) + self.bias
        return jax.nn.silu(total).astype(self.dtype).astype(F32)

    def write(self, windows, slot, inputs):
        """Writes the inputs as the window in a slot."""
        for i, one in zip(indices(len(inputs)), inputs, strict=True):
            store_if(slot > 0, windows.at[slot, i, self.here], one)


def indices(count: int) -> Any:
    """Yields 0..count-1 as the interpreter accepts them."""
    return map(jnp.int32, range(count))


def gate(
    read_slot: Int[Array, " rows"],
    write_slot: Int[Array, "rows steps"],
    valid: Bool[Array, "rows steps"],
    projected: Float[Array, "rows steps outputs"],
    y: Float[Array, "rows steps inner"],
    norm: Float[Array, " size"] | None,
    windows: Float[Array, "slots n channels"],
    *,
    groups: int,
    norms: int,
    eps: float,
    norm_before_gate: bool,
    sigmoid: bool = False,
    interpret: bool,
) -> tuple[Float[Array, "rows steps inner"], Float[Array, "slots n channels"]]:
    """Gates y, normalises it, and writes windows of a convolution in place: one program for each row and group.

    Args:
        projected: float32; gates at 0, the convolution's inputs at 2 * inner.
        norm: the norm's weight, for all channels or for each piece that is normalised; None: gate only.
        windows: of two parts (B and C, or queries and keys) by groups.
        norms: pieces of a group that are normalised on their own.
        sigmoid: the gate is sigmoid(z) and not silu(z).
    """
    rows, _, inner = y.shape
    body = functools.partial(
        _gate, groups=groups, norms=norms, eps=eps, norm_before_gate=norm_before_gate, sigmoid=sigmoid,
        normalised=norm is not None,
    )  # fmt: skip
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (y, windows)]
    return pl.pallas_call(
        body,
        grid=(rows, groups),
        out_shape=shapes,
        input_output_aliases={6: 1},
        compiler_params=plt.CompilerParams(num_warps=1 if inner // groups <= 256 else 4, num_stages=1),
        interpret=interpret,
        name="gated_norm",
    )(read_slot, write_slot, valid, projected, y, jnp.ones(1, y.dtype) if norm is None else norm, windows)


def _gate(
    read_slot, write_slot, valid, projected, y, norm, windows_in, out, windows, *,
    groups, norms, eps, norm_before_gate, sigmoid, normalised,
):  # fmt: skip
    row, group = pl.program_id(0), pl.program_id(1)
    steps, inner, dtype, size = write_slot.shape[1], y.shape[2], y.dtype, windows.shape[2] // (2 * groups)
    source = plt.load(read_slot.at[row])
    firsts = [(n * groups + group) * size + piece.start for n in range(2) for piece in pieces(size)]
    counts = [piece.size for piece in pieces(size)] * 2
    parts = [Channels(windows_in, n, 2 * inner + n, count, dtype) for n, count in zip(firsts, counts, strict=True)]
    seen = [part.window(source) for part in parts]
    of_norm = inner // groups // norms
    piece, index = (jnp.arange(padded(n), dtype=jnp.int32) for n in (norms, of_norm))
    inside = (piece < norms)[:, None] & (index < of_norm)[None, :]
    channel = group * (inner // groups) + piece[:, None] * of_norm + index[None, :]
    scale: Any = 1.0
    if normalised:
        scale = _load(norm.at[channel if norm.shape[0] == inner else jnp.where(inside, index[None, :], 0)], inside)
    for t in indices(steps):
        live, target = plt.load(valid.at[row, t]), plt.load(write_slot.at[row, t])
        for n, part in enumerate(parts):
            seen[n] = [*seen[n][1:], part.input(projected, row, t, live)]
            part.write(windows, target, seen[n])
        value = _load(y.at[row, t, channel], inside)
        z = _load(projected.at[row, t, channel], inside).astype(dtype).astype(F32)
        factor = jax.nn.sigmoid(z) if sigmoid else jax.nn.silu(z)
        value = value if norm_before_gate and normalised else value * factor
        if normalised:
            value = value * lax.rsqrt(jnp.sum(value * value, axis=1)[:, None] / of_norm + eps) * scale
            value = value * factor if norm_before_gate else value
        plt.store(out.at[row, t, channel], value.astype(dtype), mask=inside)


def _load(ref, inside):
    return plt.load(ref, mask=inside, other=jnp.zeros((), ref.dtype)).astype(F32)
