"""The gated norm against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from model_shapes import NORMS
from operation_checks import DTYPES, ELSEWHERE, Draw, assert_close, jitted, on_device

from kernels_pallas.gated_norm import gated, gated_rms_norm, reference

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in NORMS]


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["xla", ELSEWHERE])
@DTYPES
@pytest.mark.parametrize(
    "gating", [{}, {"norm_before_gate": True}, {"norm_before_gate": True, "activation": "sigmoid"}], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_equals_definition(implementation, shape, gating, dtype):
    draw, options = Draw(), {"groups": shape.groups, "eps": 1e-5, **gating}
    for lead in [(5,), (2, 3)]:
        y, z = (draw.normal(*lead, shape.channels, dtype=dtype) for _ in range(2))
        y[0] *= 1e-3  # where eps counts
        weight = draw.normal(shape.channels, dtype=dtype)
        out = jitted(gated_rms_norm, implementation=implementation, **options)(y, z, weight)
        assert out.dtype == dtype
        assert_close(out, reference.gated_rms_norm(y, z, weight, **options), dtype)


@DTYPES
def test_the_gate_alone(dtype):
    draw = Draw()
    y, z = (draw.normal(2, 3, 12, dtype=dtype) for _ in range(2))
    wide = z.astype(np.float64)
    out = gated(*on_device((y, z)))
    assert out.dtype == dtype
    assert_close(out, y.astype(np.float64) * wide / (1 + np.exp(-wide)), dtype)


def test_refuses_groups_that_do_not_divide():
    y = jnp.ones((2, 10))
    with pytest.raises(ValueError, match="10 heads do not divide into 3 groups"):
        gated_rms_norm(y, y, jnp.ones(10), groups=3, eps=1e-5)
