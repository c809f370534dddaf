"""The grouped product in plain JAX: XLA's own on accelerators, a loop over blocks of tokens on CPU.

On CPU, `ragged_dot` multiplies every token by every expert: for 512 tokens and 16 experts ten times the time of the
loop, for a decode step of 4 rows twenty times.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import load

F32 = jnp.float32
PART = 1 << 18  # weights multiplied at a time on CPU
FEWEST, MOST = 8, 128  # tokens in a block on CPU; fewer than 8 cost as much as 8


@jax.custom_vjp
def grouped_matmul(x, w, group_sizes):
    return multiply(x, w, group_sizes, transposed=False).astype(x.dtype)


def _backward(saved, dy):
    x, w, group_sizes = saved
    dx = multiply(dy, w, group_sizes, transposed=True).astype(x.dtype)
    dw = lax.platform_dependent(x, dy, group_sizes, cpu=_outer_by_blocks, default=_outer_ragged)
    return dx, dw.astype(w.dtype), None


grouped_matmul.defvjp(lambda *call: (grouped_matmul(*call), call), _backward)


def multiply(x, w, group_sizes, *, transposed):
    """Returns x @ w[e].T, or x @ w[e] if transposed, in float32; 0 for tokens of no expert."""
    cpu, default = (partial(form, transposed=transposed) for form in (_multiply_by_blocks, ragged))
    return lax.platform_dependent(x, w, group_sizes, cpu=cpu, default=default)


def ragged(x, w, group_sizes, *, transposed=False):
    """`multiply` by XLA's own grouped product."""
    dots = lax.RaggedDotDimensionNumbers((((1,), (1 if transposed else 2,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(x, w, group_sizes.astype(jnp.int32), dots, preferred_element_type=F32)
    return of_experts(out, group_sizes)


def of_experts(values, group_sizes):
    """Returns rows of tokens, with zeros for those of no expert, which may hold anything."""
    return jnp.where((jnp.arange(len(values)) < group_sizes.sum())[:, None], values, 0)


def _outer_ragged(x, dy, group_sizes):
    dots = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(dy, x, group_sizes.astype(jnp.int32), dots, preferred_element_type=F32)


def _multiply_by_blocks(x, w, group_sizes, *, transposed):
    width = w.shape[2 if transposed else 1]
    # A slice of the weights is copied before it is multiplied: small ones stay in cache.
    part = w.shape[1] if transposed else _part(*w.shape[1:])
    parts = w.shape[1] // part
    w = w.reshape(-1, part, w.shape[2])

    def multiply_rows(rows, expert, part):
        weight = load(w, expert * parts + part)
        if len(rows) == FEWEST and not transposed:  # few rows: weight first, as in `kernels_pallas.linear`
            columns = lax.optimization_barrier(rows.T)
            product = jnp.einsum("oi,it->ot", weight, columns, preferred_element_type=F32)
            return lax.optimization_barrier(product).T
        return jnp.einsum("ti,io->to" if transposed else "ti,oi->to", rows, weight, preferred_element_type=F32)

    return loop_over_blocks(multiply_rows, x, group_sizes, width, parts)


def loop_over_blocks(multiply_rows, x, group_sizes, width, parts=1):
    """Returns `multiply_rows(rows, expert, part)` of all tokens, [tokens, width], in float32: block by block of tokens
    of one expert, and in each by parts of the outputs.
    """
    tokens = x.shape[0]
    size, count, place = blocks(tokens, group_sizes)
    x = jnp.pad(x, ((0, size), (0, 0)))

    def block(i, out):
        expert, start, there = place(i // parts)

        def product_of_block():
            product = multiply_rows(lax.dynamic_slice_in_dim(x, start, size), expert, i % parts)
            return jnp.where(there[:, None], product, 0)

        # Always true, but the compiler cannot know: it would otherwise convert narrow weights of all experts at once.
        product = lax.cond(there[0], product_of_block, lambda: jnp.zeros((size, width // parts), F32))
        # Blocks are in the order of their tokens, so the next block overwrites what a block writes beyond its own.
        return lax.dynamic_update_slice(out, product, (start, i % parts * (width // parts)))

    return lax.fori_loop(0, count * parts, block, jnp.zeros((tokens + size, width), F32))[:tokens]


def _part(outputs, inputs):
    """Returns how many of a weight's rows to multiply at a time: a divisor of all."""
    fitting = [n for n in range(16, outputs) if outputs % n == 0 and n * inputs <= PART]
    return max(fitting, default=outputs)


def _outer_by_blocks(x, dy, group_sizes):
    """Returns the sum of outer products dy[t] x[t] of each expert's tokens."""
    size, count, place = blocks(x.shape[0], group_sizes)
    x, dy = (jnp.pad(v, ((0, size), (0, 0))) for v in (x, dy))

    def block(i, out):
        expert, start, there = place(i)
        rows, dy_rows = (lax.dynamic_slice_in_dim(v, start, size) for v in (x, dy))
        dy_rows = jnp.where(there[:, None], dy_rows, 0)
        product = jnp.einsum("to,ti->oi", dy_rows, rows, preferred_element_type=F32)
        return lax.dynamic_update_index_in_dim(out, out[expert] + product, expert, 0)

    return lax.fori_loop(0, count, block, jnp.zeros((group_sizes.shape[0], dy.shape[1], x.shape[1]), F32))


def tokens_of_block(tokens, experts, fewest, most):
    """Returns the fewest, doubled until an expert's tokens fit on average, or until it is the most."""
    size = fewest
    while size < most and size * experts < tokens:
        size *= 2
    return size


def blocks(tokens, group_sizes):
    """Blocks of tokens of one expert each: their size, their count, and for block i its expert, its first token and
    which of its tokens are the expert's.
    """
    size = tokens_of_block(tokens, group_sizes.shape[0], FEWEST, MOST)
    ends = jnp.cumsum(group_sizes)
    each = (group_sizes + size - 1) // size
    after = jnp.cumsum(each)

    def place(i):
        expert = jnp.searchsorted(after, i, side="right")
        start = ends[expert] - group_sizes[expert] + (i - (after[expert] - each[expert])) * size
        return expert, start, start + jnp.arange(size) < ends[expert]

    return size, after[-1], place
