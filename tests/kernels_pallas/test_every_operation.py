"""What holds for every operation as a CPU runs it: stores in place, derivatives, arrays without elements, refusals."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import model_calls
import numpy as np
import pytest
from call_checks import check_call
from model_calls import BF16, F32, OPERATIONS, call_of, program, quantized
from model_shapes import MAMBA2
from operation_checks import Draw, assert_in_place, on_device
from recurrence_cases import ODD, entry, how, plain, states, tails

from kernels_pallas import causal_conv1d, paged_attention
from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.expert_choice import Rule, choose_experts
from kernels_pallas.expert_mlp import expert_mlp
from kernels_pallas.gated_norm import gated_rms_norm
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear, linear_pair
from kernels_pallas.places import Anchored, Packed, Rows, Tiles
from kernels_pallas.quantized import Quantized
from mamba_jax.kernel_check.calls import NAMES, STORES
from mamba_jax.kernel_check.values import Values

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


def stored():
    """Those with a store. On CPU, XLA copies the rings of `gated_replay`."""
    for case in kinds():
        name = case.values[0]
        if name != "gated_replay" and set(NAMES[name].split()) & set(STORES):
            few = "recurrence" in name or "conv1d" in name
            yield pytest.param(*case.values, id=case.id, marks=pytest.mark.smoke("name") if few else ())


@pytest.mark.parametrize(("rows", "dtype"), [(1, F32), (3, BF16)], ids=["1, float32", "3, bfloat16"])
@pytest.mark.parametrize(("name", "shape"), list(stored()))
def test_in_place(name, shape, rows, dtype):
    """In C++ and in plain JAX: no second store, and no copy of one. The store may be tails and windows as well."""
    shape = dataclasses.replace(shape, **{n: rows for n in ("rows", "tiles") if hasattr(shape, n)})
    call = call_of(name, shape, dtype, dtype)
    kept = {n: call.arguments[n] for n in ("store", "windows") if n in call.arguments}
    slots = jax.tree.leaves(kept)[0].shape
    many = 20_000_000 // math.prod(slots[1:])

    def larger(array):
        return jax.ShapeDtypeStruct((many, *array.shape[1:]), array.dtype) if array.shape[0] == slots[0] else array

    call = dataclasses.replace(call, arguments={**call.arguments, **jax.tree.map(larger, kept)})
    natively = "invariant" if "conv1d" in name else "native"
    for one in call.candidates:
        if one.name in (natively, "xla") and one.why_not(*call.split(call.arguments)) is None:
            assert_in_place(program(call, one.name), *call.apart(call.arrays))


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


# Attention to a part of the pages runs in steps of an engine only: its loop's end is found at run time.
@pytest.mark.parametrize(("name", "shape"), [each for each in kinds() if each.values[0] != "paged_attention_part"])
def test_gradients(name, shape):
    """In float32 that of a small step in some direction; in bfloat16 about the same, and not 0."""
    call = call_of(name, shape, F32)
    leaves = jax.jit(Values(call, classes=False).make)(0)
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
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: grouped_matmul(x, weight, sizes).sum()))(x), expected, 1e-5)
    one = jax.tree.map(lambda v: v[0], weight)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: linear(x, one).sum()))(x), [wide[0].sum(0)] * 5, rtol=1e-5)


TPU, GPU = "pallas_tpu_interpreted", "pallas_gpu_interpreted"


def refused(name, implementation, reason, dtype=F32, given=None, **changes):
    return pytest.param(name, implementation, reason, dtype, given or {}, changes, id=f"{name}, {reason}")


WHOLE = {"q_heads": 4, "kv_heads": 2, "head_dim": 128, "page_size": 8}
MLP = {"experts": 7, "size": 48}
UP, DOWN = quantized(7, 96, 48, dtype=jnp.int8), (7, 48, 48)


@pytest.mark.parametrize(
    ("name", "implementation", "reason", "dtype", "given", "changes"),
    [
        refused("recurrence_scan", GPU, "tiles have a size of 36, not a multiple of 16", tile_size=36),
        refused("recurrence_update", GPU, "keys have a size of 36, not a multiple of 8", state=36),
        *(refused(name, GPU, "keys have a size of 20, not a multiple of 8", state=20, erase=erase)
          for name in ("gated_update", "gated_replay") for erase in (False, True)),
        refused("gated_scan", TPU, "32 tokens in tiles of 8, not multiples of 16", tile_size=8),
        refused("gated_scan", TPU, "a convolution over 10 inputs, more than 9", width=10),
        refused("gated_scan", TPU, "8 heads of 24, not a multiple of 128 channels", head_dim=24),
        refused("gated_scan", TPU, "a norm of 64 channels, no multiple of 128", head_dim=16),
        refused("expert_choice", GPU, "64 x 512 scores, more than 8192", tokens=64, experts=512),
        refused("expert_choice", GPU, "some of several groups",
                given={"rule": Rule(2, "scores", num_groups=4, top_groups=2)}),
        refused("expert_mlp", GPU, "33 tokens, more than 32", tokens=33),
        refused("expert_mlp", GPU, "weights are 48 x 24, not multiples of 16", size=24),
        refused("expert_mlp", GPU, "it multiplies float16", dtype=jnp.float16),
        *(refused("expert_mlp", GPU, reason, dtype=BF16, given={"up": UP, "down": down}, gated=True, **MLP)
          for down, reason in (
              (quantized(*DOWN, dtype=jnp.int4), "it multiplies bfloat16 by int4"),
              (quantized(*DOWN, dtype=jnp.int8, group=24, zero=True), "weights have zero points"),
              (quantized(*DOWN, dtype=jnp.int8, group=8), "a scale for fewer inputs than 16"))),
        refused("paged_attention", "pallas_tpu", "heads have a size of 64, not a multiple of 128",
                **WHOLE | {"head_dim": 64}),
        refused("paged_attention", "pallas_tpu", "it hides the first 1 keys", given={"first_key": 1}, **WHOLE),
        refused("paged_attention", "pallas_tpu", "3 kv heads do not fill registers", dtype=BF16,
                **WHOLE | {"kv_heads": 3, "q_heads": 3}),
        refused("paged_attention", "pallas_tpu", rows=1, context=8 << 18, **WHOLE,
                reason="a page table of 262144 pages does not fit in 921600 bytes of scalar memory"),
        refused("paged_attention_part", TPU, "queries are float16, keys and values float16", dtype=jnp.float16,
                **WHOLE),
        refused("paged_attention", GPU, "heads have a size of 72, not a multiple of 16", **WHOLE | {"head_dim": 72}),
        refused("paged_attention", GPU, "pages hold 8 keys, not a multiple of 16", **WHOLE),
        refused("paged_attention", GPU, "queries see only the last 3 keys", given={"window": 3},
                **WHOLE | {"page_size": 16}),
    ],
)  # fmt: skip
def test_says_what_it_cannot_run(name, implementation, reason, dtype, given, changes):
    call = call_of(name, dataclasses.replace(OPERATIONS[name][2][0].small(), **changes), dtype, **given)
    with pytest.raises(UnsupportedError, match=reason):
        jax.eval_shape(program(call, implementation), *call.apart(call.arrays))


TAIL = model_calls.tail(dataclasses.replace(MAMBA2[0].small(), interval=8), F32)
LONGER_TAIL = jax.tree.map(lambda ring: model_calls.shape(2, 12, ring.shape[2]), TAIL)
ONE = model_calls.ints(1)


@pytest.mark.smoke("reason")
@pytest.mark.parametrize(
    ("name", "reason", "given", "changes"),
    [
        ("gated_rms_norm", "384 heads do not divide into 5 groups", {"groups": 5}, {}),
        ("gated_rms_norm", "384 heads do not divide into 0 groups", {"groups": 0}, {}),
        ("causal_conv1d_update", "activation is 'gelu', expected 'silu' or None", {"activation": "gelu"}, {}),
        ("recurrence_scan", "12 heads do not divide into 5 groups", {}, {"groups": 5}),
        ("recurrence_scan", r"strength has shape \(4, 128, 12\), expected \[tiles, tile_size, heads\]",
         {"tiles": Tiles(ONE, ONE, ONE)}, {}),
        ("recurrence_update", "skip is not supported with erase", {"skip": model_calls.shape(12)}, {"erase": True}),
        ("recurrence_update", r"rows.write_slot has shape \(1, 2\), expected \[rows, steps\]",
         {"rows": Rows(ONE, model_calls.ints(1, 2))}, {}),
        *(("recurrence_replay", reason, given, {"interval": 8}) for reason, given in (
            ("tails have 12 entries, expected a power of two of at least 8", {"tail": LONGER_TAIL}),
            ("tails have 8 entries, expected a power of two of at least 9", {"places": Anchored(*[ONE] * 6, 9)}),
            ("the interval is 0, expected at least 1", {"places": Anchored(*[ONE] * 6, 0)}),
            (r"tail.key has shape \(2, 8, 7\), expected 160 channels",
             {"tail": TAIL._replace(key=model_calls.shape(2, 8, 7))}))),
    ],
)  # fmt: skip
def test_refuses_what_does_not_fit(name, reason, given, changes):
    with pytest.raises(ValueError, match=reason):
        check_call(name, dataclasses.replace(OPERATIONS[name][2][0].small(), **changes), "xla", static=given)


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
    part = places | {"first_page": jnp.int32(1), "page_stride": 2}
    yield lambda: paged_attention.paged_attention_part(q, kv, **part, scale=1.0), ()
    new = {"page": ints(0), "offset": ints(0)}
    yield lambda: (None, paged_attention.write_kv(kv, floats(0, 2, 8), floats(0, 2, 8), **new)), (kv,)
    yield lambda: (None, paged_attention.copy_pages(kv, source=ints(0), target=ints(0))), (kv,)
    yield lambda: (linear(x, floats(5, 6)), *linear_pair(x, floats(5, 6), floats(5, 6))), ()
    yield lambda: (grouped_matmul(floats(0, 6), floats(3, 5, 6), ints(3)),), ()
    rule, none = Rule(2, "scores", num_groups=4, top_groups=2), ints(0)
    for bias in (None, floats(8)):
        yield lambda bias=bias: choose_experts(floats(0, 8), bias, none > 0, jnp.int32(0), own=8, rule=rule)[:4], ()
    mlp = functools.partial(expert_mlp, floats(0, 6), floats(3, 10, 6), floats(3, 6, 5), none, none, ints(3))
    yield lambda: (mlp(activation=jax.nn.silu),), ()
    yield lambda: (gated_rms_norm(x, x, floats(6), eps=1e-5, groups=2),), ()


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
