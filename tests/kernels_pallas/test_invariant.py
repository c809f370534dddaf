"""Operations whose bits do not depend on the number of rows, on their places, or on where a sequence was cut: in C++,
and as the kernels of TPU and GPU in Pallas' interpreter.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, needs_native, on_device
from recurrence_cases import ODD, SELECTIVE, definition, entry, how, kind, part, plain
from test_causal_conv1d import packed
from test_quantized_products import quantized

from kernels_pallas import fixed_order
from kernels_pallas.causal_conv1d import causal_conv1d_prefill, causal_conv1d_sequence, causal_conv1d_update
from kernels_pallas.dispatch import KernelChoice, UnsupportedError
from kernels_pallas.gated_norm import gated_rms_norm
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear
from kernels_pallas.paged_attention import attention_sequence, merge_attention_parts
from kernels_pallas.paged_attention.api import paged_attention, paged_attention_part
from kernels_pallas.places import Rows, Tiles
from mamba_jax.config import RopeConfig
from mamba_jax.modules.attention import rotate, rotations
from mamba_jax.modules.basic import scaled
from mamba_jax.sampling import sampling_row
from mamba_jax.sampling.draw_tokens import BLOCK
from mamba_jax.sampling.largest import in_blocks
from mamba_jax.sampling.logits import penalize, truncate, weights_of
from tests.support.engines.engines import OPTIMIZED

pytestmark = needs_native
CHOICE = KernelChoice(platform="cpu", named="invariant")
OPTIONS = fixed_order.COMPILER_OPTIONS | OPTIMIZED


@pytest.fixture(
    autouse=True,
    params=["cpu", pytest.param("tpu", marks=pytest.mark.full), pytest.param("gpu", marks=pytest.mark.slow)],
)
def platform(request, monkeypatch):
    """Runs each test with the implementations of every platform."""
    if request.param != "cpu":
        interpreted = KernelChoice(platform=request.param, named=fixed_order.INTERPRETED)
        monkeypatch.setattr(sys.modules[__name__], "CHOICE", interpreted)
    return request.param


def run(function, *arguments):
    leaves, structure = jax.tree.flatten(arguments)
    compiled = compile_for(function, CHOICE, structure, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in leaves))
    return jax.tree.map(np.asarray, compiled(*arguments))


@functools.lru_cache(maxsize=8)
def compile_for(function, choice, structure, *shapes):
    with choice.applied():
        compiled = jax.jit(function).lower(*jax.tree.unflatten(structure, shapes)).compile(OPTIONS)
    # A library that rounds in its own way, and that XLA uses for large arrays only. Blocks of kernels have one shape.
    assert choice.named == fixed_order.INTERPRETED or "ynn_fusion" not in compiled.as_text()
    return compiled


def run_rows(function, *arrays):
    """Returns the results of all rows, of which the last few give the same bits alone."""
    whole = run(function, *arrays)
    for rows in (1, 2, 3, 8, 33):
        np.testing.assert_array_equal(run(function, *(v[-rows:] for v in arrays)), whole[-rows:])
    return whole


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 61), (128, 384), (3000, 7), (33, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_a_product_keeps_its_bits(inputs, outputs, dtype):
    x, w = normal(70, inputs).astype(dtype), normal(outputs, inputs, seed=1).astype(dtype)
    product = functools.partial(linear, out_dtype=jnp.float32)
    whole = run(product, x, w)
    np.testing.assert_allclose(whole, x.astype(np.float32) @ w.astype(np.float32).T, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 4, 5, 8, 24, 25, 33, 64):
        np.testing.assert_array_equal(run(product, x[-rows:], w), whole[-rows:])


@pytest.mark.parametrize("size", [4099, 17_000])  # kernels add up parts of a longer row
@pytest.mark.parametrize("function", [fixed_order.row_sum, fixed_order.log_sum_exp])
def test_a_sum_of_a_row_keeps_its_bits(function, size):
    x = normal(70, size)
    wide = x.astype(np.float64)
    expected = wide.sum(-1) if function is fixed_order.row_sum else np.log(np.exp(wide).sum(-1))
    # Rounding depends on how many parts an instruction set adds up at once. One part is the least accurate.
    of_one_part = np.abs(np.cumsum(x, -1)[:, -1] - wide.sum(-1)).max() if function is fixed_order.row_sum else 1e-4
    np.testing.assert_allclose(run_rows(function, x)[:, 0], expected, rtol=1e-5, atol=of_one_part)


@pytest.mark.parametrize("function", [fixed_order.exp, fixed_order.sigmoid, fixed_order.silu, fixed_order.softplus])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_function_of_an_element_is_right_and_keeps_its_bits(function, dtype):
    x = jnp.asarray(np.linspace(-80, 80, 4001, dtype=np.float32), dtype)
    whole = run(function, x)
    wide = np.asarray(x, np.float64)
    expected = {
        fixed_order.exp: np.exp(wide),
        fixed_order.sigmoid: 1 / (1 + np.exp(-wide)),
        fixed_order.silu: wide / (1 + np.exp(-wide)),
        fixed_order.softplus: np.logaddexp(0, wide),
    }[function]
    np.testing.assert_allclose(whole.astype(np.float64), expected, rtol=2e-7 if dtype == jnp.float32 else 2**-8)
    for begin, end in ((0, 1), (7, 19), (64, 128), (3000, 3065)):
        np.testing.assert_array_equal(run(function, x[begin:end]), whole[begin:end])


def test_functions_of_numbers_that_are_not_finite():
    x = jnp.asarray([-np.inf, np.inf, np.nan, -1e30, 1e30], jnp.float32)
    np.testing.assert_array_equal(run(fixed_order.exp, x), [0, np.inf, np.nan, 0, np.inf])
    np.testing.assert_array_equal(run(fixed_order.sigmoid, x), [0, 1, np.nan, 0, 1])
    np.testing.assert_array_equal(run(fixed_order.softplus, x), np.float32([0, np.inf, np.nan, 0, 1e30]))
    x = np.array([[-np.inf] * 5, [-np.inf, 0, -np.inf, -np.inf, -np.inf], [np.inf, 0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(run(fixed_order.log_sum_exp, x)[:, 0], [-np.inf, 0, np.inf])


@pytest.mark.parametrize("experts", [3, 5, 6, 7, 12])
def test_scores_of_a_few_experts_keep_their_bits(experts):
    """XLA computed the exponentials of 12 numbers, those of two tokens with 6 experts, by another function."""
    x, weight = normal(70, 72), jnp.asarray(normal(experts, 72, seed=1))

    def scores(x):
        return fixed_order.sigmoid(fixed_order.router_product(x, weight))

    whole = run(scores, x)
    for rows in (1, 2, 3, 4, 5, 8):
        parts = np.concatenate([run(scores, x[first : first + rows]) for first in range(0, 64, rows)])
        np.testing.assert_array_equal(parts, whole[: len(parts)])


def rotated(x):
    rope = RopeConfig(theta=100.0, size=32)
    return rotate(x[:, :150].reshape(len(x), -1, 50), *rotations(x[:, 150].astype(jnp.int32), rope))


@pytest.mark.parametrize(
    "function",
    [
        rotated,
        lambda x: jax.nn.softplus(x + 0.3),
        lambda x: jax.nn.silu(x * 1.7),
        lambda x: jax.nn.gelu(x, approximate=True),
        lambda x: gated_rms_norm(x[:, :150], x[:, :150] + 1, jnp.arange(150) / 7, groups=2, eps=1e-5),
        lambda x: x + scaled(jax.nn.sigmoid(x), 0.22) + scaled(x, 0.7),
        fixed_order.softmax,
        lambda x: fixed_order.product_by_head(x[:, :150].reshape(-1, 3, 50), jnp.array(normal(3, 20, 50, seed=9))),
        lambda x: fixed_order.router_product(x, jnp.array(normal(8, 151, seed=9))),
        lambda x: fixed_order.weighted_sum(x[:, :3], x[:, :150].reshape(len(x), 3, 50)),
        lambda x: fixed_order.quotient(x, fixed_order.row_sum(jnp.abs(x))),
    ],
    ids=[
        *("rotary", "softplus", "silu", "gelu", "gated norm", "residual"),
        *("softmax", "products of heads", "router", "weighted sum", "quotient"),
    ],
)
def test_functions_of_a_row_keep_its_bits_and_equal_the_ordinary_ones(function):
    x = np.concatenate([normal(70, 150), np.arange(70, dtype=np.float32)[:, None]], axis=1)
    np.testing.assert_allclose(run_rows(function, x), function(jnp.array(x)), rtol=1e-4, atol=1e-4)


def test_a_rounded_product_is_not_contracted_with_a_sum():
    x, y, z = (normal(64, 128, seed=seed) for seed in range(3))
    np.testing.assert_array_equal(run(lambda x, y, z: fixed_order.rounded(x * y) + z, x, y, z), x * y + z)


def prefill(x, window, weight, bias, start, stop):
    """The convolution of tokens [start, stop) of one row after its window; returns y and the window at the end."""
    store = np.stack([np.full_like(window, np.nan), window, np.zeros_like(window)])
    y, store = run(
        lambda x, store, weight, bias: causal_conv1d_prefill(
            x, weight, bias, store, jax.tree.map(jnp.asarray, packed([len(x)], [1], len(x), first_slot=2))
        ),
        x[start:stop], store, weight, bias,
    )  # fmt: skip
    return y, store[2]


def test_a_convolution_keeps_its_bits_where_its_row_is_cut(platform):
    x, weight, bias, window = normal(40, 24), normal(24, 4, seed=1), normal(24, seed=2), np.zeros((3, 24), np.float32)
    whole, end = prefill(x, window, weight, bias, 0, 40)
    if platform == "cpu":  # XLA sees through the interpreter: it knows the zero of `rounded`, and contracts sums
        pair = np.stack([normal(40, 24, seed=3), x])
        np.testing.assert_array_equal(run(causal_conv1d_sequence, pair, weight, bias)[1], whole)
    for cut in (1, 2, 17, 39):
        left, middle = prefill(x, window, weight, bias, 0, cut)
        right, last = prefill(x, middle, weight, bias, cut, 40)
        np.testing.assert_array_equal(np.concatenate([left, right]), whole)
        np.testing.assert_array_equal(last, end)
    store = np.stack([window, prefill(x, window, weight, bias, 0, 36)[1], window, window, window, window])
    y, store = run(
        lambda x, store, weight, bias: causal_conv1d_update(
            x, weight, bias, store, Rows(jnp.array([1]), jnp.array([[2, 3, 4, 5]]))
        ),
        x[None, 36:], store, weight, bias,
    )  # fmt: skip
    np.testing.assert_array_equal(y[0], whole[36:])
    np.testing.assert_array_equal(store[5], end)


@pytest.mark.smoke
@pytest.mark.parametrize("members", [3, 1, 2])
def test_a_query_keeps_its_bits_in_blocks_and_tables_of_any_size(platform, members):
    """Of N members, each attends to every N-th page, and what they find is merged."""
    if members > 1 and platform != "cpu":
        pytest.skip("takes minutes in the interpreter")
    page, pages, heads = 8, 40, 4
    kv = normal(pages + 1, page, 4, 6)
    kv[0] = np.nan
    kv = jnp.array(kv)
    q, table = normal(300, heads, 6, seed=1), np.arange(1, pages + 1)[None]

    def attend(q, positions, table):
        places = {"positions": positions, "block_row": jnp.zeros(len(q), jnp.int32), "scale": 0.4}
        if members == 1:
            return paged_attention(q, kv, page_table=table, **places)
        table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % members)))
        part = functools.partial(paged_attention_part, q, kv, page_stride=members, **places)
        parts = [part(page_table=table[:, i::members], first_page=jnp.int32(i)) for i in range(members)]
        return merge_attention_parts(*(jnp.stack(each) for each in zip(*parts, strict=True)))

    position = np.arange(300)
    whole = run(attend, q.reshape(3, 100, heads, 6), position.reshape(3, 100), table).reshape(q.shape)
    with KernelChoice(platform="cpu").applied():
        ordinary = np.asarray(jax.jit(attend)(q.reshape(3, 100, heads, 6), position.reshape(3, 100), table))
    np.testing.assert_allclose(whole, ordinary.reshape(q.shape), rtol=1e-5, atol=1e-5)
    # In the interpreter: at bounds of pages and of pieces of keys, and at each place in a page.
    alone = position if platform == "cpu" else np.union1d([0, 7, 8, 127, 128, 255, 256, 299], position[5::13])
    singles = run(attend, q[alone, None], alone[:, None], table)
    np.testing.assert_array_equal(singles[:, 0], whole[alone])
    for last in (7, 127, 128, 200):
        few = run(
            attend, q[None, last - 3 : last + 1], position[None, last - 3 : last + 1], table[:, : last // page + 1]
        )
        np.testing.assert_array_equal(few[0], whole[last - 3 : last + 1])


def test_other_types_are_refused():
    with CHOICE.applied(), pytest.raises(ValueError, match="arrays are float16, not float32 or bfloat16"):
        linear(jnp.ones((2, 4), jnp.float16), jnp.ones((3, 4), jnp.float16))


@pytest.mark.parametrize(
    "shape", [*ODD[:4], dataclasses.replace(SELECTIVE, inner=300, state=7)], ids=lambda shape: kind(shape)
)
def test_a_recurrence_keeps_its_bits_in_tiles_steps_and_sequences(platform, shape):
    if platform != "cpu" and (platform == "gpu" or kind(shape) == "selective"):
        # XLA sees through the interpreter, and sums a head's outputs in another order in a loop.
        pytest.skip("not built, or with other bits in the interpreter")
    tokens, draw = 24, Draw()
    if kind(shape) != "selective":
        shape = dataclasses.replace(shape, head_dim=5, state=19)
    inputs, options = entry(draw, shape, 1, tokens), on_device(how(draw, shape))

    def program(form):
        return functools.partial(run, functools.partial(plain(form, shape), **options))

    scan, sequence, update = map(program, ("scan", "sequence", "update"))
    narrow = type(inputs)(*(v.astype(jnp.bfloat16) for v in inputs[:-1]), inputs[-1])
    narrow, zeros = part(narrow, slice(None), slice(2)), np.zeros((2, *shape.state_shape), np.float32)
    assert update(narrow, zeros, Rows(np.array([0]), np.zeros((1, 2), int)))[0].dtype == jnp.bfloat16
    whole, end = sequence(inputs)
    # Step by step, against the definition as well.
    state = wide = zeros
    for t in range(tokens):
        slots, step = Rows(np.array([min(t, 1)]), np.array([[1]])), part(inputs, slice(None), slice(t, t + 1))
        y, state = update(step, state, slots)
        expected, wide = definition("update", shape)(step, wide, slots, **options)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(y[0, 0], whole[0, t])
    np.testing.assert_array_equal(state[1], end[0])
    # In tiles, the last of which has padding that holds NaN; in several calls; next to another row.
    padded = [np.concatenate([one[0], np.full((4, *one.shape[2:]), np.nan, np.float32)]) for one in inputs]
    padded[-1][tokens:] = 0
    tiles = type(inputs)(*(one.reshape(-1, 4, *one.shape[1:]) for one in padded))
    store = np.zeros((4, *shape.state_shape), np.float32)
    places = Tiles(np.array([1, 0, 0, 0, 0, 0, 0], bool), np.zeros(7, int), np.array([0, 0, 2, 0, 0, 0, 3]))
    y, store = scan(tiles, store, places)
    np.testing.assert_array_equal(y.reshape(-1, *y.shape[2:])[:tokens], whole[0])
    np.testing.assert_array_equal(store[3], end[0])
    places = Tiles(np.array([1, 1, 0, 0, 0], bool), np.array([0, 2, 0, 0, 0]), np.array([0, 0, 0, 0, 1]))
    y, store = scan(part(tiles, [0, 3, 4, 5, 6]), store, places)
    np.testing.assert_array_equal(y[1:].reshape(-1, *y.shape[2:])[:12], whole[0, 12:])
    np.testing.assert_array_equal(store[1], end[0])


def test_a_shape_that_the_kernel_does_not_take_is_refused_in_every_form(platform):
    if platform != "cpu":
        return
    shape, draw = dataclasses.replace(ODD[0], head_dim=5, state=19), Draw()
    inputs, options = entry(draw, shape, 1, 4), on_device(how(draw, shape))
    store, slots = np.zeros((2, *shape.state_shape), np.float32), Rows(np.array([0]), np.ones((1, 4), int))
    tiles = Tiles(np.ones(1, bool), np.zeros(1, int), np.ones(1, int))
    gpu = KernelChoice(platform="gpu", named=fixed_order.INTERPRETED)
    for form, places in (("update", (store, slots)), ("scan", (store, tiles)), ("sequence", ())):
        with gpu.applied(), pytest.raises(UnsupportedError, match="cannot run this call: keys have a size of 19, not"):
            plain(form, shape)(*on_device((inputs, *places)), **options)


@pytest.mark.parametrize("count", [0, 3])
def test_no_rows_and_no_inputs(count):
    sums = run(lambda x: fixed_order.product(x, jnp.ones((5, 3 - count))), np.zeros((count, 3 - count), np.float32))
    np.testing.assert_array_equal(sums, np.zeros((count, 5)))
    assert run(fixed_order.exp, np.zeros((0, 5), np.float32)).shape == (0, 5)


def check_experts(x, w, wide):
    """A token's bits do not depend on how many tokens its expert has."""
    whole = run(grouped_matmul, x, w, np.array([len(x), 0, 0]))
    expected = x.astype(np.float32) @ np.asarray(wide, np.float32)[0].T
    np.testing.assert_allclose(whole.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
    for count in (1, 2, 7, 50):
        sizes = np.array([count, 3, len(x) - count - 3])
        np.testing.assert_array_equal(run(grouped_matmul, x, w, sizes)[:count], whole[:count])


@pytest.mark.parametrize("inputs", [37, 38])  # an odd number has no pairs of bfloat16
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_of_experts_keeps_its_bits(platform, dtype, inputs):
    if platform != "cpu":
        with CHOICE.applied(), pytest.raises(ValueError, match="it is not built for TPU and GPU"):
            grouped_matmul(jnp.ones((2, 4)), jnp.ones((1, 3, 4)), jnp.array([2]))
        return
    w = normal(3, 66, inputs, seed=1).astype(dtype)
    check_experts(normal(90, inputs).astype(dtype), w, w)


@pytest.mark.parametrize(("narrow", "groups"), [(jnp.int8, None), (jnp.int4, None), (jnp.int4, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_keeps_its_bits_with_quantized_weights(platform, dtype, narrow, groups):
    x, w = normal(90, 36).astype(dtype), quantized(40, 36, dtype=narrow, groups=groups)
    whole = run_rows(lambda x: linear(x, w), x)
    expected = x.astype(np.float32) @ np.asarray(w.dequantize()).T
    np.testing.assert_allclose(whole.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
    if platform == "cpu":  # experts are not built elsewhere
        w = quantized(3, 40, 36, dtype=narrow, groups=groups)
        check_experts(x, w, w.dequantize())


def test_attention_over_a_sequence_has_the_bits_of_a_cache():
    page, heads, length = 32, 4, 150
    q, k, v = (normal(2, length, n, 6, seed=seed) for seed, n in enumerate((heads, 2, 2)))
    whole = run(lambda q, k, v: attention_sequence(q, k, v, scale=0.4), q, k, v)
    kv = np.zeros((6, page, 4, 6), np.float32)
    kv[1:].reshape(-1, 4, 6)[:length] = np.stack([k[1], v[1]], axis=2).reshape(length, 4, 6)

    def attend(q, kv):
        return paged_attention(
            q, kv, positions=jnp.arange(length)[:, None], page_table=jnp.arange(1, 6)[None],
            block_row=jnp.zeros(length, jnp.int32), scale=0.4,
        )  # fmt: skip

    np.testing.assert_array_equal(run(attend, q[1][:, None], kv)[:, 0], whole[1])


@pytest.mark.smoke
@pytest.mark.parametrize(("count", "vocab"), [(33, 1000), (9, 300)])
def test_weights_of_draws_do_not_depend_on_other_rows(count, vocab):
    settings = {"temperature": 0.7, "top_p": 0.8, "min_p": 0.001, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
    rows = [sampling_row(**{name: value * (1 - 0.01 * i) for name, value in settings.items()}) for i in range(count)]
    table = jax.tree.map(lambda *columns: jnp.stack([jnp.asarray(one) for one in columns]), *rows)
    logits = jnp.asarray(2 * normal(count, 1, vocab))
    counts = jnp.asarray(np.random.default_rng(1).integers(0, 4, size=(count, vocab)), jnp.int32)

    def weights(logits, table, counts):
        drafts = jnp.zeros((logits.shape[0], 0), jnp.int32)
        logits = penalize(logits, table, counts, counts > 2, drafts)
        chosen = truncate(weights_of(logits, table.temperature), table)
        return chosen, fixed_order.row_sum(in_blocks(chosen, BLOCK))

    together = run(weights, logits, table, counts)
    for first, last in ((0, 1), (3, 4), (2, 5), (1, 9)):
        some = run(weights, *jax.tree.map(lambda x, a=first, b=last: x[a:b], (logits, table, counts)))
        for one, all_rows in zip(some, together, strict=True):
            np.testing.assert_array_equal(one, all_rows[first:last])
