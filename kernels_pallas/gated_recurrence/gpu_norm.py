"""The second kernel of a layer's decode on GPU: gates y, normalizes it, and writes windows of the vectors in place.

One program for each row and group writes the windows, and the inputs in tails, that programs of several heads read in
the first kernel (`kernels_pallas.gated_recurrence.pallas_gpu`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton_blocks import padded, pieces, update_call
from kernels_pallas.triton_decode import F32, AnchoredRow, Channels, SlotRow, indices, masked, wait


def gated_norm(places, projected, y, weights, windows, *, groups, gates, interpret):
    """Returns the output, and windows and, if there is one, ring of the vectors.

    `places` are arguments of `SlotRow`, or, with a ring, of `AnchoredRow`. The projections' outputs `projected` have
    gates at 0, and the inputs of the vectors' convolution at 2 * inner.
    """
    (rows, _, inner), norm = y.shape, weights.norm
    stores = (windows.vectors,) if windows.vector_ring is None else (windows.vectors, windows.vector_ring)
    body = functools.partial(
        _kernel, stores=len(stores), groups=groups, norms=weights.a_log.shape[0] // groups if gates.erase else 1,
        gates=gates, normalized=norm is not None, interpret=interpret,
    )  # fmt: skip
    return update_call(
        body,
        "gated_norm",
        (rows, groups),
        (*places, projected, y, jnp.ones(1, y.dtype) if norm is None else norm),
        jax.ShapeDtypeStruct(y.shape, y.dtype),
        stores,
        interpret=interpret,
        warps=1 if inner // groups <= 256 else 4,
    )


def _kernel(*refs, stores, groups, norms, gates, normalized, interpret):
    *places, projected, y, norm = refs[: -2 * stores - 1]
    windows_in, *ring_in = refs[-2 * stores - 1 : -stores - 1]
    out, *written = refs[-stores - 1 :]
    row, group = pl.program_id(0), pl.program_id(1)
    place = (AnchoredRow if ring_in else SlotRow)(row, *places)
    steps, inner, dtype, size = y.shape[1], y.shape[2], y.dtype, windows_in.shape[2] // (2 * groups)
    firsts = [(n * groups + group) * size + piece.start for n in range(2) for piece in pieces(size)]
    counts = [piece.size for piece in pieces(size)] * 2
    parts = [
        Channels(windows_in, n, 2 * inner + n, count, dtype, ring=ring_in[0] if ring_in else None)
        for n, count in zip(firsts, counts, strict=True)
    ]
    inputs = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, of_step in zip(indices(steps), inputs, strict=True):
        for part, one in zip(parts, of_step, strict=True):
            part.write(place, t, one, *written)
    of_norm = inner // groups // norms
    piece, index = (jnp.arange(padded(n), dtype=jnp.int32) for n in (norms, of_norm))
    inside = (piece < norms)[:, None] & (index < of_norm)[None, :]
    channel = group * (inner // groups) + piece[:, None] * of_norm + index[None, :]
    scale: Any = 1.0
    if normalized:
        at = channel if norm.shape[0] == inner else jnp.where(inside, index[None, :], 0)
        scale = masked(norm.at[at], inside).astype(F32)

    def one_step(t, _):
        value = masked(y.at[row, t, channel], inside).astype(F32)
        z = masked(projected.at[row, t, channel], inside).astype(dtype).astype(F32)
        factor = jax.nn.sigmoid(z) if gates.erase and gates.activation == "sigmoid" else jax.nn.silu(z)
        value = value if gates.norm_before_gate and normalized else value * factor
        if normalized:
            value = value * lax.rsqrt(jnp.sum(value * value, axis=1)[:, None] / of_norm + gates.eps) * scale
            value = value * factor if gates.norm_before_gate else value
        plt.store(out.at[row, t, channel], value.astype(dtype), mask=inside)
        return 0

    lax.fori_loop(0, steps, one_step, 0)
