"""Operations whose bits do not depend on the number of rows, on their places, or on where a sequence was cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import native
from kernels_pallas.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update
from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.fixed_order import log_sum_exp, rounded, row_sum
from kernels_pallas.gated_norm import gated_rms_norm
from kernels_pallas.linear import linear
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import state_update
from mamba_jax.config import RopeConfig
from mamba_jax.modules.basic import scaled
from mamba_jax.modules.rotary import rotate, rotations

pytestmark = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")
CHOICE = KernelChoice(platform="cpu", named="invariant")


def run(function, *arguments):
    with CHOICE.applied():
        return jax.tree.map(np.asarray, jax.jit(function)(*arguments))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 61), (128, 384), (3000, 7), (33, 2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_of_a_product_keeps_its_bits(inputs, outputs, dtype):
    x, w = normal(70, inputs).astype(dtype), normal(outputs, inputs, seed=1).astype(dtype)
    whole = run(lambda x, w: linear(x, w, out_dtype=jnp.float32), x, w)
    np.testing.assert_allclose(whole, x.astype(np.float32) @ w.astype(np.float32).T, rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 4, 5, 8, 24, 25, 33, 64):
        first = 70 - rows
        np.testing.assert_array_equal(
            run(lambda x, w: linear(x, w, out_dtype=jnp.float32), x[first:], w), whole[first:]
        )


@pytest.mark.parametrize("function", [row_sum, log_sum_exp])
def test_a_sum_of_a_row_keeps_its_bits(function):
    x = normal(70, 4099)
    whole = run(function, x)
    wide = x.astype(np.float64)
    expected = wide.sum(-1) if function is row_sum else np.log(np.exp(wide).sum(-1))
    np.testing.assert_allclose(whole[:, 0], expected, rtol=1e-5, atol=1e-4)
    for rows in (1, 3, 8, 33):
        np.testing.assert_array_equal(run(function, x[-rows:]), whole[-rows:])


def rotated(x, position):
    rope = RopeConfig(theta=100.0, size=32)
    return rotate(x.reshape(len(x), -1, 50), *rotations(position, rope))


@pytest.mark.parametrize(
    "function",
    [
        rotated,
        lambda x, position: jax.nn.softplus(x + 0.3),
        lambda x, position: jax.nn.silu(x * 1.7),
        lambda x, position: jax.nn.gelu(x, approximate=True),
        lambda x, position: gated_rms_norm(x, x + 1, jnp.arange(x.shape[1]) / 7, groups=2, eps=1e-5),
        lambda x, position: x + scaled(jax.nn.sigmoid(x), 0.22) + scaled(x, 0.7),
    ],
    ids=["rotary", "softplus", "silu", "gelu", "gated norm", "residual"],
)
def test_functions_of_a_row_keep_its_bits(function):
    x, position = normal(70, 150), np.arange(70)
    whole = run(function, x, position)
    for rows in (1, 2, 3, 8, 33):
        np.testing.assert_array_equal(run(function, x[-rows:], position[-rows:]), whole[-rows:])


def test_a_rounded_product_is_not_contracted_with_a_sum():
    x, y, z = (normal(64, 128, seed=seed) for seed in range(3))
    np.testing.assert_array_equal(run(lambda x, y, z: rounded(x * y) + z, x, y, z), x * y + z)


def test_the_logarithm_of_a_sum_of_infinities():
    x = np.array([[-np.inf] * 5, [-np.inf, 0, -np.inf, -np.inf, -np.inf], [np.inf, 0, 0, 0, 0]], np.float32)
    np.testing.assert_array_equal(run(log_sum_exp, x)[:, 0], [-np.inf, 0, np.inf])


def prefill(x, window, weight, bias, start, stop):
    """The convolution of tokens [start, stop) of one row after its window; returns y and the window at the end."""
    store = np.stack([np.full_like(window, np.nan), window, np.zeros_like(window)])
    y, store = run(
        lambda x, store, weight, bias: causal_conv1d_prefill(
            x, weight, bias, store, token_row=jnp.zeros(len(x), jnp.int32), row_start=jnp.array([0]),
            read_slot=jnp.array([1]), tile_row=jnp.array([0]), tile_end=jnp.array([len(x)]),
            write_slot=jnp.array([2]),
        ),
        x[start:stop], store, weight, bias,
    )  # fmt: skip
    return y, store[2]


def test_a_convolution_keeps_its_bits_where_its_row_is_cut():
    x, weight, bias, window = normal(40, 24), normal(24, 4, seed=1), normal(24, seed=2), np.zeros((3, 24), np.float32)
    whole, end = prefill(x, window, weight, bias, 0, 40)
    for cut in (1, 2, 17, 39):
        left, middle = prefill(x, window, weight, bias, 0, cut)
        right, last = prefill(x, middle, weight, bias, cut, 40)
        np.testing.assert_array_equal(np.concatenate([left, right]), whole)
        np.testing.assert_array_equal(last, end)
    store = np.stack([window, prefill(x, window, weight, bias, 0, 36)[1], window, window, window, window])
    y, store = run(
        lambda x, store, weight, bias: causal_conv1d_update(
            x, weight, bias, store, read_slot=jnp.array([1]), write_slot=jnp.array([[2, 3, 4, 5]])
        ),
        x[None, 36:], store, weight, bias,
    )  # fmt: skip
    np.testing.assert_array_equal(y[0], whole[36:])
    np.testing.assert_array_equal(store[5], end)


def test_a_scan_is_the_state_update_token_by_token():
    tokens, heads, groups = 24, 6, 3
    x, b, c = normal(tokens, heads, 5), normal(tokens, groups, 7, seed=1), normal(tokens, groups, 7, seed=2)
    dt = np.abs(normal(tokens, heads, seed=3)) + 0.01
    a, d = -jnp.abs(normal(heads, seed=4)), jnp.array(normal(heads, seed=5))
    dt[20:] = 0  # padding
    empty = np.zeros((3, heads, 5, 7), np.float32)

    def scan(x, dt, b, c, store):
        cut = [v.reshape(-1, 8, *v.shape[1:]) for v in (x, dt, b, c)]
        first, none = jnp.array([True, False, False]), jnp.array([0, 0, 0])
        return ssd_scan(
            cut[0], cut[1], a, cut[2], cut[3], d, store,
            tile_first=first, read_slot=none, write_slot=jnp.array([0, 0, 2]),
        )  # fmt: skip

    y, store = run(scan, x, dt, b, c, empty)
    state = np.zeros((2, heads, 5, 7), np.float32)
    for t in range(20):
        step = [v[None, t : t + 1] for v in (x, dt, b, c)]
        one, state = run(
            lambda x, dt, b, c, state, t=t: state_update(
                x, dt, a, b, c, d, state, read_slot=jnp.array([min(t, 1)]), write_slot=jnp.array([[1]])
            ),
            *step, state,
        )  # fmt: skip
        np.testing.assert_array_equal(one[0, 0], y.reshape(tokens, heads, 5)[t])
    np.testing.assert_array_equal(store[2], state[1])


def test_a_query_keeps_its_bits_in_blocks_and_tables_of_any_size():
    page, pages, heads = 8, 40, 4
    kv = normal(pages + 1, page, 4, 6)
    kv[0] = np.nan
    kv = jnp.array(kv)
    q, table = normal(300, heads, 6, seed=1), np.arange(1, pages + 1)[None]

    def attend(q, positions, table):
        return paged_attention(
            q, kv, positions=positions, page_table=table, block_row=jnp.zeros(len(q), jnp.int32), scale=0.4
        )

    position = np.arange(300)
    whole = run(attend, q.reshape(3, 100, heads, 6), position.reshape(3, 100), table).reshape(q.shape)
    with KernelChoice(platform="cpu").applied():
        ordinary = np.asarray(jax.jit(attend)(q.reshape(3, 100, heads, 6), position.reshape(3, 100), table))
    np.testing.assert_allclose(whole, ordinary.reshape(q.shape), rtol=1e-5, atol=1e-5)
    singles = run(attend, q[:, None], position[:, None], table)
    np.testing.assert_array_equal(singles[:, 0], whole)
    for last in (7, 127, 128, 200):
        few = run(
            attend, q[None, last - 3 : last + 1], position[None, last - 3 : last + 1], table[:, : last // page + 1]
        )
        np.testing.assert_array_equal(few[0], whole[last - 3 : last + 1])


def test_other_types_are_refused():
    with CHOICE.applied(), pytest.raises(ValueError, match="arrays are float16, not float32 or bfloat16"):
        linear(jnp.ones((2, 4), jnp.float16), jnp.ones((3, 4), jnp.float16))
