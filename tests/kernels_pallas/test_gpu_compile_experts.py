"""The choice of experts and their MLPs compiled by XLA's compiler for an H200 that is not at hand: next to no registers
are spilled.

A few with --full; all with --slow.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from topology import compile_for_gpu, registers_of_kernels

from benchmarks.kernels.workloads import EXPERT_MLPS
from kernels_pallas.expert_choice import Rule, choose_experts
from kernels_pallas.expert_mlp import expert_mlp
from kernels_pallas.quantised import Quantised
from mamba_jax.modules.basic import activation
from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

CASES = [(1, 128, 6), (8, 128, 6), (64, 128, 6), (8, 512, 10), (16, 512, 10), (8, 512, 22), (3, 72, 10), (128, 16, 2)]
FEW = [(8, 128, 6), (8, 512, 10)]
FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize(("tokens", "experts", "count"), [*FEW, *(slow(*c) for c in CASES if c not in FEW)])
def test_choice_of_experts(tokens, experts, count, tmp_path):
    rule = Rule(count, "scores", normalize=True, scaling=2.5)
    choose = partial(choose_experts, own=experts, rule=rule, implementation="pallas_gpu")
    shape = jax.ShapeDtypeStruct
    call = shape((tokens, experts), jnp.float32), shape((experts,), jnp.float32), shape((tokens,), bool)
    compile_for_gpu("h200", choose, *call, shape((), jnp.int32), xla_dump_to=str(tmp_path))
    used, spilled = registers_of_kernels(tmp_path)["expert_choice"]
    assert used <= 128
    assert spilled <= (16 if tokens * experts * count > 1 << 16 else 0)


@pytest.mark.parametrize("narrow", [None, *(slow(d) for d in (jnp.int8, FP8))], ids=str)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[] if "8 rows" in s.name else pytest.mark.slow) for s in EXPERT_MLPS],
    ids=lambda s: s.name,
)
def test_mlps_of_experts(shape, narrow, tmp_path):
    """And nothing is as large as a weight in memory: only what the first kernel gives the second one."""
    struct, (tokens, inputs, size) = jax.ShapeDtypeStruct, (shape.tokens, shape.inputs, shape.size)
    if narrow is FP8:
        size -= size % 128
    run = partial(expert_mlp, activation=activation("silu" if shape.gated else "relu2"), implementation="pallas_gpu")

    def weight(outputs, inputs):
        lead = (shape.experts, outputs)
        if narrow is None:
            return struct((*lead, inputs), jnp.bfloat16)
        # fp8 as published with Qwen3-Next: a scale for each 128 inputs.
        groups = struct((shape.experts, inputs // 128, outputs), jnp.float32) if narrow is FP8 else None
        return Quantised(struct((*lead, inputs), narrow), struct(lead, jnp.float32), groups)

    rows = struct((tokens * shape.chosen,), jnp.int32)
    weights = weight(size * (1 + shape.gated), inputs), weight(inputs, size)
    call = struct((tokens, inputs), jnp.bfloat16), *weights, rows, rows, struct((shape.experts,), jnp.int32)
    program = compile_for_gpu("h200", run, *call, xla_dump_to=str(tmp_path))
    for used, spilled in registers_of_kernels(tmp_path).values():
        assert used <= (128 if narrow is None else 192)
        assert spilled == 0
    assert program.memory_analysis().temp_size_in_bytes <= 2 * tokens * shape.chosen * size + 1024
