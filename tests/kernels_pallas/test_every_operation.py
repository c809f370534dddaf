"""What holds for every operation as a CPU runs it by default: derivatives, and arrays without elements."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_calls import BF16, F32, OPERATIONS, call_of, program
from operation_checks import Draw, on_device
from recurrence_cases import ODD, entry, how, plain, states, tails

from kernels_pallas import causal_conv1d, paged_attention
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear, linear_pair
from kernels_pallas.places import Anchored, Packed, Rows, Tiles
from kernels_pallas.quantized import Quantized
from mamba_jax.kernel_check.values import values_of

pytestmark = pytest.mark.full


def kinds():
    """Each operation with one shape of each kind of recurrence."""
    for name, (_, _, shapes) in OPERATIONS.items():
        found = {(getattr(s, "erase", None), getattr(s, "by_channel", None)): s for s in reversed(shapes)}
        for kind, shape in found.items():
            marks = [pytest.mark.slow] if any(kind) and "gated" in name else []
            if name in ("recurrence_scan", "paged_attention") and not any(kind):
                marks = [pytest.mark.smoke]
            yield pytest.param(name, small(shape), marks=marks, id=f"{name}, {shape.name}")


def small(shape):
    sizes = {"rows": 2, "steps": 2, "tiles": 2, "tile_size": 16, "context": 40, "tokens": 6}
    return dataclasses.replace(shape.small(), **{n: size for n, size in sizes.items() if getattr(shape, n, 0)})


def floats_of(leaves):
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def loss_of(call, leaves):
    """Returns a function of the call's float arrays in float32; the others are those of `leaves`."""
    run = program(call)

    def loss(values):
        given = iter(values)
        filled = [
            next(given).astype(form.dtype) if jnp.issubdtype(form.dtype, jnp.floating) else leaf
            for form, leaf in zip(call.arrays, leaves, strict=True)
        ]
        return sum(jnp.sin(v.astype(jnp.float32)).sum() for v in floats_of(jax.tree.leaves(run(*call.apart(filled)))))

    return loss


@pytest.mark.parametrize(("name", "shape"), list(kinds()))
def test_gradients(name, shape):
    """In float32 that of a small step in some direction; in bfloat16 about the same, and not 0."""
    call = call_of(name, shape, F32)
    leaves = jax.jit(values_of(call, classes=False).make)(0)
    values, random = floats_of(leaves), np.random.default_rng(0)
    loss_and_gradient = jax.jit(jax.value_and_grad(loss_of(call, leaves)))
    _, gradient = loss_and_gradient(values)
    direction = [random.normal(size=v.shape).astype(np.float32) for v in values]
    step = 2e-3
    moved = ([v + s * step * d for v, d in zip(values, direction, strict=True)] for s in (1, -1))
    ahead, behind = (loss_and_gradient(each)[0] for each in moved)
    along = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
    length = sum(float((g**2).sum()) for g in gradient) ** 0.5
    assert abs(float(ahead - behind) / (2 * step) - along) < 0.05 * length + 0.02
    narrow = jax.jit(jax.grad(loss_of(call_of(name, shape, BF16, BF16), leaves)))(values)
    for one, other in zip(narrow, gradient, strict=True):
        assert np.linalg.norm(one - other) <= 0.2 * np.linalg.norm(other) + 0.02 * length


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_gradients_through_quantized_weights(dtype):
    values = np.random.default_rng(0).integers(-8, 8, size=(3, 6, 4))
    weight = Quantized(jnp.asarray(values).astype(dtype), jnp.full((3, 6), 0.5))
    x, sizes, wide = jnp.ones((5, 4)), jnp.array([2, 0, 2]), weight.dequantize()
    expected = jnp.stack([wide[expert].sum(axis=0) for expert in (0, 0, 2, 2)] + [jnp.zeros(4)])
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: grouped_matmul(x, weight, sizes).sum()))(x), expected, rtol=1e-5
    )
    one = jax.tree.map(lambda v: v[0], weight)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: linear(x, one).sum()))(x), [wide[0].sum(axis=0)] * 5, rtol=1e-5
    )


def floats(*sizes):
    return jnp.ones(sizes)


def ints(*sizes):
    return jnp.zeros(sizes, jnp.int32)


def calls(rows, steps):
    """Each operation on so many rows and steps, one of which is 0: a call, and what it gives but for empty outputs."""
    tiles, slots = Tiles(jnp.zeros(rows, bool), ints(rows), ints(rows)), Rows(ints(rows), ints(rows, steps))
    anchored = Anchored(*[ints(rows)] * 6, 8)
    for shape in ODD:
        tokens, options = on_device((entry(Draw(), shape, rows, steps), how(Draw(), shape)))
        store, tail = on_device(jax.tree.map(np.nan_to_num, (states(Draw(), shape, 3), tails(shape, 3, 16))))
        for form, stores, places in (
            ("scan", (store,), (tiles,)),
            ("update", (store,), (slots,)),
            ("replay", (store, tail), (anchored,)),
            ("sequence", (), ()),
        ):
            kept = stores or (jnp.zeros((rows, *shape.state_shape)),)
            yield functools.partial(plain(form, shape), tokens, *stores, *places, **options), kept
    x = floats(rows, steps, 6)
    taps, windows, ring = floats(6, 4), floats(3, 3, 6), floats(3, 8, 6)
    packed = Packed(
        ints(0), ints(0), ints(rows), ints(rows), ints(0), ints(0), ints(0, 4), ints(0, 4), Tiles(*[ints(0)] * 3)
    )
    yield lambda: causal_conv1d.causal_conv1d_prefill(floats(0, 6), taps, None, windows, packed), (windows,)
    yield lambda: causal_conv1d.causal_conv1d_update(x, taps, None, windows, slots), (windows,)
    yield lambda: causal_conv1d.causal_conv1d_replay(x, taps, None, windows, ring, anchored), (windows, ring)
    yield lambda: (causal_conv1d.causal_conv1d_sequence(x, taps, None),), ()
    q, k, kv = floats(rows, steps, 4, 8), floats(rows, steps, 2, 8), floats(3, 4, 4, 8)
    places = {"positions": ints(rows, steps), "page_table": ints(2, 2), "block_row": ints(rows)}
    yield lambda: (paged_attention.attention_sequence(q, k, k, scale=1.0),), ()
    yield lambda: (paged_attention.paged_attention(q, kv, **places, scale=1.0),), ()
    yield (
        lambda: (None, paged_attention.write_kv(kv, floats(0, 2, 8), floats(0, 2, 8), page=ints(0), offset=ints(0))),
        (kv,),
    )
    yield lambda: (None, paged_attention.copy_pages(kv, source=ints(0), target=ints(0))), (kv,)
    yield lambda: (linear(x, floats(5, 6)), *linear_pair(x, floats(5, 6), floats(5, 6))), ()
    yield lambda: (grouped_matmul(floats(0, 6), floats(3, 5, 6), ints(3)),), ()


@pytest.mark.smoke
@pytest.mark.parametrize(("rows", "steps"), [(0, 3), (2, 0), (0, 0)])
def test_arrays_without_elements(rows, steps):
    for call, kept in calls(rows, steps):
        out = jax.jit(call)()
        first, *others = out if kept else (None, *out)
        for empty in jax.tree.leaves(first) if kept else others:
            assert empty.size == 0
        for found, expected in zip(jax.tree.leaves(others), jax.tree.leaves(kept), strict=True) if kept else ():
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(0, 5, 6), (4, 0, 6), (4, 5, 0)])
def test_products_without_elements(tokens, outputs, inputs):
    x, weight = floats(tokens, inputs), floats(3, outputs, inputs)
    for out in (linear(x, weight[0]), *linear_pair(x, weight[0], weight[1]), grouped_matmul(x, weight, ints(3))):
        np.testing.assert_array_equal(out, np.zeros((tokens, outputs)))
