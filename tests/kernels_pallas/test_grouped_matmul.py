"""The grouped product against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, jitted, on_device

from benchmarks.kernels.workloads import GROUPED_PRODUCTS
from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.grouped_matmul import grouped_matmul, reference
from kernels_pallas.native import WHY_MISSING

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in GROUPED_PRODUCTS]
ODD = SHAPES[-1]


def sizes(draw, shape, used):
    """Group sizes that sum to `used`: uneven, and some of them empty."""
    return np.bincount(draw.random.integers(0, shape.experts, used) // 2 * 2 % shape.experts, minlength=shape.experts)


class Product:
    """Every implementation of `grouped_matmul`."""

    implementation: str

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, shape, dtype):
        draw = Draw()
        x = draw.normal(shape.tokens, shape.inputs, dtype=dtype)
        w = draw.normal(shape.experts, shape.outputs, shape.inputs, dtype=dtype)
        run = jitted(grouped_matmul, implementation=self.implementation)
        for used in (shape.tokens, shape.tokens // 2, 0):
            group_sizes = sizes(draw, shape, used).astype(np.int32)
            out = run(x, w, group_sizes)
            assert out.dtype == dtype
            assert_close(out, reference.grouped_matmul(x, w, group_sizes), dtype)

    def test_one_expert_has_all_tokens(self):
        draw = Draw()
        x, w = draw.normal(50, ODD.inputs), draw.normal(ODD.experts, ODD.outputs, ODD.inputs)
        run = jitted(grouped_matmul, implementation=self.implementation)
        for expert in range(ODD.experts):
            group_sizes = np.where(np.arange(ODD.experts) == expert, 50, 0).astype(np.int32)
            assert_close(run(x, w, group_sizes), x @ w[expert].T)

    def test_wide_weights(self):
        # More than is multiplied at a time.
        draw = Draw()
        x, w = draw.normal(9, 1100), draw.normal(2, 480, 1100)
        group_sizes = np.array([4, 5], np.int32)
        out = jitted(grouped_matmul, implementation=self.implementation)(x, w, group_sizes)
        assert_close(out, reference.grouped_matmul(x, w, group_sizes))

    @pytest.mark.parametrize("used", [77, 60])
    def test_gradients(self, used):
        draw = Draw()
        x, w = draw.normal(ODD.tokens, ODD.inputs), draw.normal(ODD.experts, ODD.outputs, ODD.inputs)
        group_sizes = sizes(draw, ODD, used)
        expert = np.repeat(np.arange(ODD.experts), group_sizes)

        def plain(x, w):
            return jnp.einsum("ti,toi->to", x[:used], w[expert])

        def ours(x, w):
            return grouped_matmul(x, w, jnp.asarray(group_sizes), implementation=self.implementation)

        def gradients(function):
            return jax.jit(jax.grad(lambda x, w: jnp.sin(function(x, w)).sum(), argnums=(0, 1)))(*on_device((x, w)))

        for actual, expected in zip(gradients(ours), gradients(plain), strict=True):
            assert_close(actual, expected)

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    def test_does_not_multiply_every_token_by_every_expert(self, dtype):
        x, w = jnp.ones((64, 256), dtype), jnp.ones((32, 128, 256), dtype)
        run = jax.jit(lambda *v: grouped_matmul(*v, implementation=self.implementation))
        memory = run.lower(x, w, jnp.full(32, 2)).compile().memory_analysis()
        assert memory.temp_size_in_bytes < w.nbytes / 2


class TestXla(Product):
    implementation = "xla"


@pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")
class TestNative:
    """By itself: it leaves calls with many tokens an expert to XLA."""

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize(("experts", "outputs", "inputs"), [(16, 130, 1100), (5, 3, 17), (1, 64, 64)])
    def test_equals_definition(self, experts, outputs, inputs, dtype):
        draw = Draw()
        tokens = 2 * experts
        x, w = draw.normal(tokens, inputs, dtype=dtype), draw.normal(experts, outputs, inputs, dtype=dtype)
        run = jitted(grouped_matmul, implementation="native")
        for used in (tokens, tokens // 2, 0):
            for group_sizes in (
                np.bincount(draw.random.integers(0, experts, used), minlength=experts).astype(np.int32),
                np.where(np.arange(experts) == experts - 1, used, 0).astype(np.int32),
            ):
                out = run(x, w, group_sizes)
                assert out.dtype == dtype
                assert_close(out, reference.grouped_matmul(x, w, group_sizes), dtype)

    def test_gradients(self):
        draw = Draw()
        x, w = draw.normal(8, 40), draw.normal(6, 24, 40)
        group_sizes = np.array([3, 0, 1, 2, 0, 1], np.int32)

        def gradients(implementation):
            def loss(x, w):
                return jnp.sin(grouped_matmul(x, w, jnp.asarray(group_sizes), implementation=implementation)).sum()

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(*on_device((x, w)))

        for ours, plain in zip(gradients("native"), gradients("xla"), strict=True):
            assert_close(ours, plain)

    def test_leaves_many_tokens_to_xla(self):
        choice = KernelChoice(platform="cpu")
        w = jnp.ones((4, 8, 8))
        with choice.applied():
            grouped_matmul(jnp.ones((8, 8)), w, jnp.full(4, 2))
            grouped_matmul(jnp.ones((9, 8)), w, jnp.full(4, 2))
        reason = "not native: 9 tokens, not 1 to 2 for each of 4 experts"
        assert choice.chosen == {"grouped_matmul": {"native": "", "xla": reason}}
