"""The kernel that JAX keeps for TPU, interpreted, as every implementation of the grouped product."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_matmul import ODD, SHAPES, Product


class TestTpu(Product):
    implementation = "pallas_tpu_interpreted"
    test_does_not_multiply_every_token_by_every_expert = None  # the interpreter's memory says nothing
    test_one_expert_has_all_tokens = None

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [ODD, pytest.param(SHAPES[0], marks=pytest.mark.slow)], ids=lambda s: s.name)
    def test_equals_definition(self, shape, dtype):
        super().test_equals_definition(shape, dtype)
