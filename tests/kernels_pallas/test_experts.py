"""The choice of experts, and their MLPs, against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_same_bits, jitted
from test_quantized_products import by_definition, quantized

from kernels_pallas.expert_choice import Rule, choose_experts
from kernels_pallas.expert_choice import reference as choice_reference
from kernels_pallas.expert_mlp import expert_mlp
from kernels_pallas.expert_mlp import reference as mlp_reference
from kernels_pallas.fixed_order import products_as_sums, router_product
from mamba_jax.modules.basic import activation
from tests.support.selection import slow

pytestmark = pytest.mark.full

SOFTMAX, SHARES = Rule(3, "softmax"), Rule(2, "scores")
SIGMOID = Rule(4, "scores", normalize=True, scaling=2.5)
GROUPS = Rule(3, "scores", normalize=True, num_groups=4, top_groups=2)


def scores_of(draw, tokens, experts):
    """Scores of which many are equal, also with their bias."""
    return np.round(2 * draw.normal(tokens, experts)) / 2, np.round(2 * draw.normal(experts)) / 2


def assert_same_choice(actual, expected):
    for field in ("chosen", "order", "place", "sizes"):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field), err_msg=field)
    assert_close(actual.weights, expected.weights)


def test_scores_as_sums_are_the_routers_product():
    draw = Draw()
    x, weight = draw.normal(8, 96), draw.normal(24, 96)
    assert_close(jitted(products_as_sums)(x, weight), jitted(router_product)(x, weight), tolerance=1e-6)


class Choose:
    """Every implementation."""

    implementation: str
    rules = (SOFTMAX, SHARES, SIGMOID)

    def run(self, *args, **static):
        return jitted(choose_experts, **static, implementation=self.implementation)(*args)

    def check(self, scores, bias, valid, first=0, **static):
        given = scores, bias, valid, np.int32(first)
        assert_same_choice(self.run(*given, **static), choice_reference.choose_experts(*given, **static))

    @pytest.mark.parametrize(
        ("experts", "tokens"),
        [(12, 1), (8, 5), pytest.param(12, 8, marks=pytest.mark.smoke), slow(12, 5), slow(8, 1), slow(8, 8)],
    )
    def test_equals_definition(self, tokens, experts):
        for rule in self.rules:
            draw = Draw(tokens * experts)
            scores, bias = scores_of(draw, tokens, experts)
            valid = draw.random.random(tokens) < 0.7
            self.check(scores, None, valid, own=experts, rule=rule)
            self.check(scores, bias, valid, own=experts, rule=rule)

    @pytest.mark.parametrize("first", [0, 4, 8])
    def test_experts_of_one_device(self, first):
        scores, bias = scores_of(Draw(first), 6, 12)
        valid = np.array([True, True, False, True, True, True])
        for rule in self.rules:
            self.check(scores, bias, valid, first, own=4, rule=rule)

    @pytest.mark.smoke
    def test_numbers_that_are_not_finite(self):
        """Padding may hold them: each token's experts are distinct, and rows have one place each."""
        scores = np.array([[np.nan, -np.inf, np.nan, np.inf], [-np.nan, -np.inf, -np.inf, -np.nan], [0, -0.0, 1, 0]])
        actual = self.run(scores.astype(np.float32), None, np.array([1, 0, 1], bool), np.int32(0), own=4, rule=SOFTMAX)
        np.testing.assert_array_equal(actual.chosen, jax.lax.top_k(scores.astype(np.float32), 3)[1])
        assert sorted(actual.order) == list(range(9))
        np.testing.assert_array_equal(actual.order[actual.place], np.arange(9))


class TestChoiceByXla(Choose):
    implementation = "xla"
    rules = (SOFTMAX, SHARES, SIGMOID, GROUPS)


class TestChoiceByGpu(Choose):
    implementation = "pallas_gpu_interpreted"

    @pytest.mark.parametrize(("tokens", "experts", "count"), [(64, 128, 6), (8, 512, 10), (3, 72, 10)])
    def test_sizes_of_models(self, tokens, experts, count):
        draw = Draw(experts)
        scores, rule = draw.normal(tokens, experts), Rule(count, "softmax")
        valid = draw.random.random(tokens) < 0.8
        plain = jitted(choose_experts, own=experts, rule=rule, implementation="xla")
        expected = plain(scores, None, valid, np.int32(0))
        actual = self.run(scores, None, valid, np.int32(0), own=experts, rule=rule)
        for one, other in zip(actual[1:], expected[1:], strict=True):
            assert_same_bits(one, other)
        assert_close(actual.weights, expected.weights)


EXPERTS, CHOSEN = 7, 3
BF16 = jnp.bfloat16


def call(
    tokens, *, gated=False, inputs=48, size=32, experts=EXPERTS, chosen=CHOSEN, dtype=np.float32, valid=None, **of
):
    """Arguments, with experts by random scores; `of`: `first` and `own`, the experts of a device."""
    draw = Draw(tokens)
    x = draw.normal(tokens, inputs)
    own, first = of.get("own", experts), np.int32(of.get("first", 0))
    up = draw.normal(own, size * (1 + gated), inputs, scale=inputs**-0.5)
    down = draw.normal(own, inputs, size, scale=size**-0.5)
    valid = np.ones(tokens, bool) if valid is None else np.asarray(valid)
    choose = jitted(choose_experts, own=own, rule=Rule(chosen, "softmax"), implementation="xla")
    choice = choose(draw.normal(tokens, experts), None, valid, first)
    return *(v.astype(dtype) for v in (x, up, down)), *choice[2:]


class ExpertMLP:
    """Every implementation."""

    implementation: str

    def run(self, *args, act="silu"):
        return jitted(expert_mlp, activation=activation(act), implementation=self.implementation)(*args)

    def check(self, *args, act="silu", dtype=np.float32):
        expected = mlp_reference.expert_mlp(*args, activation=activation(act))
        assert np.abs(expected).max() > 0.1
        assert_close(self.run(*args, act=act), expected, dtype)

    @pytest.mark.smoke("gated")
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("tokens", [1, 5, 20])
    def test_equals_definition(self, tokens, gated):
        self.check(*call(tokens, gated=gated))
        if tokens == 5:
            self.check(*call(8, gated=gated, inputs=128, size=64, dtype=BF16), dtype=BF16)

    @pytest.mark.parametrize("act", ["relu2", "gelu", "gelu_pytorch_tanh", "relu"])
    def test_activations(self, act):
        self.check(*call(6), act=act)
        self.check(*call(6, gated=True), act=act)

    @pytest.mark.parametrize("groups", [None, 3])
    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=lambda d: d.__name__)
    @pytest.mark.parametrize("gated", [False, True])
    def test_weights_in_8_bits(self, gated, dtype, groups):
        x, _, _, *rows = call(6, gated=gated, dtype=BF16)
        up = quantized(EXPERTS, 48 * (1 + gated), 48, dtype=dtype, groups=groups)
        down = quantized(EXPERTS, 48, 48, dtype=dtype, groups=groups)
        x, act = x / 4, activation("silu")
        expected = mlp_reference.expert_mlp(x, by_definition(up), by_definition(down), *rows, activation=act)
        assert_close(self.run(x, up, down, *rows), expected, BF16)

    def test_padding_gives_zeros(self):
        args = call(6, valid=[True, False, True, True, False, False])
        actual = self.run(*args)
        assert not actual[[1, 4, 5]].any()
        self.check(*args)
        assert not self.run(*call(4, valid=[False] * 4)).any()

    @pytest.mark.parametrize("first", [0, 2, 5])
    def test_experts_of_one_device(self, first):
        """Rows of other devices' experts give 0."""
        self.check(*call(6, own=2, first=first))

    def test_tokens_of_padding_and_weights_of_idle_experts_do_not_matter(self):
        """They may be anything, such as NaN."""
        x, up, down, *rows = call(2, valid=[True, False])
        expected = self.run(x, up, down, *rows)
        idle = np.asarray(rows[-1]) == 0
        assert idle.any()
        x[1] = up[idle] = down[idle] = np.nan
        np.testing.assert_array_equal(self.run(x, up, down, *rows), expected)

    def test_one_expert_has_all_rows(self):
        x, up, down, *_ = call(9)
        order = np.arange(9, dtype=np.int32)
        self.check(x, up, down, order, order, np.array([0, 0, 9, 0, 0, 0, 0], np.int32))


class TestMLPByXla(ExpertMLP):
    implementation = "xla"


class TestMLPByGpu(ExpertMLP):
    implementation = "pallas_gpu_interpreted"

    @pytest.mark.parametrize(("experts", "chosen", "tokens"), [(128, 6, 8), (72, 10, 32), (512, 22, 3)])
    def test_numbers_of_experts_of_models(self, experts, chosen, tokens):
        self.check(*call(tokens, experts=experts, chosen=chosen, inputs=32, size=16))
