"""The choice of experts against its definition."""

import jax
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_same_bits, jitted

from kernels_pallas.expert_choice import Rule, choose_experts, reference
from kernels_pallas.fixed_order import products_as_sums, router_product
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

    def run(self, *args, own, rule):
        return jitted(choose_experts, own=own, rule=rule, implementation=self.implementation)(*args)

    @pytest.mark.parametrize(
        ("experts", "tokens"),
        [(12, 1), (8, 5), pytest.param(12, 8, marks=pytest.mark.smoke), slow(12, 5), slow(8, 1), slow(8, 8)],
    )
    def test_equals_definition(self, tokens, experts):
        for rule in self.rules:
            draw = Draw(tokens * experts)
            scores, bias = scores_of(draw, tokens, experts)
            valid = draw.random.random(tokens) < 0.7
            for given in (None, bias):
                expected = reference.choose_experts(scores, given, valid, np.int32(0), own=experts, rule=rule)
                assert_same_choice(self.run(scores, given, valid, np.int32(0), own=experts, rule=rule), expected)

    @pytest.mark.parametrize("first", [0, 4, 8])
    def test_experts_of_one_device(self, first):
        scores, bias = scores_of(Draw(first), 6, 12)
        valid = np.array([True, True, False, True, True, True])
        for rule in self.rules:
            expected = reference.choose_experts(scores, bias, valid, first, own=4, rule=rule)
            assert_same_choice(self.run(scores, bias, valid, np.int32(first), own=4, rule=rule), expected)

    @pytest.mark.smoke
    def test_numbers_that_are_not_finite(self):
        """Padding may hold them: each token's experts are distinct, and rows have one place each."""
        scores = np.array([[np.nan, -np.inf, np.nan, np.inf], [-np.nan, -np.inf, -np.inf, -np.nan], [0, -0.0, 1, 0]])
        actual = self.run(
            scores.astype(np.float32), None, np.array([True, False, True]), np.int32(0), own=4, rule=SOFTMAX
        )
        np.testing.assert_array_equal(actual.chosen, jax.lax.top_k(scores.astype(np.float32), 3)[1])
        assert sorted(actual.order) == list(range(9))
        np.testing.assert_array_equal(actual.order[actual.place], np.arange(9))


class TestXla(Choose):
    implementation = "xla"
    rules = (SOFTMAX, SHARES, SIGMOID, GROUPS)


class TestGpu(Choose):
    implementation = "pallas_gpu_interpreted"

    @pytest.mark.parametrize(("tokens", "experts", "count"), [(64, 128, 6), (8, 512, 10), (3, 72, 10)])
    def test_sizes_of_models(self, tokens, experts, count):
        draw = Draw(experts)
        scores, rule = draw.normal(tokens, experts), Rule(count, "softmax")
        valid = draw.random.random(tokens) < 0.8
        plain = jitted(choose_experts, own=experts, rule=rule, implementation="xla")
        expected, actual = (
            plain(scores, None, valid, np.int32(0)),
            self.run(scores, None, valid, np.int32(0), own=experts, rule=rule),
        )
        for one, other in zip(actual[1:], expected[1:], strict=True):
            assert_same_bits(one, other)
        assert_close(actual.weights, expected.weights)
