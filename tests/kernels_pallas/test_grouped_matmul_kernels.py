"""The kernel that JAX keeps for TPU, interpreted, as every implementation of the grouped product."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_matmul import ODD, SHAPES, Product

from kernels_pallas.grouped_matmul.pallas_tpu import lies_inputs_first
from tests.support.selection import slow

pytestmark = pytest.mark.full

INPUTS_FIRST = dataclasses.replace(ODD, name="outputs innermost in memory", inputs=72, outputs=128)


class TestTpu(Product):
    implementation = "pallas_tpu_interpreted"
    test_does_not_multiply_every_token_by_every_expert = None  # the interpreter's memory says nothing
    test_one_expert_has_all_tokens = None

    @pytest.mark.smoke
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [ODD, INPUTS_FIRST, slow(SHAPES[0])], ids=lambda s: s.name)
    def test_equals_definition(self, shape, dtype):
        super().test_equals_definition(shape, dtype)

    def test_weights_that_lie_inputs_first(self):
        assert lies_inputs_first((INPUTS_FIRST.experts, INPUTS_FIRST.outputs, INPUTS_FIRST.inputs))
        assert not lies_inputs_first((ODD.experts, ODD.outputs, ODD.inputs))
