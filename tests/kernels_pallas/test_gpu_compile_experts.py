"""The choice of experts compiled by XLA's compiler for an H200 that is not at hand: next to no registers are spilled.

A few with --full; all with --slow.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from topology import compile_for_gpu, registers_of_kernels

from kernels_pallas.expert_choice import Rule, choose_experts

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

CASES = [(1, 128, 6), (8, 128, 6), (64, 128, 6), (8, 512, 10), (16, 512, 10), (8, 512, 22), (3, 72, 10), (128, 16, 2)]
FEW = [(8, 128, 6), (8, 512, 10)]


@pytest.mark.parametrize(
    ("tokens", "experts", "count"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES if c not in FEW)]
)
def test_choice_of_experts(tokens, experts, count, tmp_path):
    rule = Rule(count, "scores", normalize=True, scaling=2.5)
    choose = partial(choose_experts, own=experts, rule=rule, implementation="pallas_gpu")
    shape = jax.ShapeDtypeStruct
    call = shape((tokens, experts), jnp.float32), shape((experts,), jnp.float32), shape((tokens,), bool)
    compile_for_gpu("h200", choose, *call, shape((), jnp.int32), xla_dump_to=str(tmp_path))
    used, spilled = registers_of_kernels(tmp_path)["expert_choice"]
    assert used <= 128
    assert spilled <= (16 if tokens * experts * count > 1 << 16 else 0)
