"""Triton kernels compiled by XLA's compiler for an H200 that is not at hand, at the sizes of real models.

It takes them, stores are updated in place, caches are not copied, and registers are not spilled. Those of recurrences
are also lowered for CUDA without a compiler. Whether they are right on a GPU, the last test and `mamba-jax check`
tell.

A few with --full; all with --slow.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from compile_cases import NEMOTRON, NEXT, ON_GPU
from model_calls import BF16, F32, FP8, OPERATIONS, call_of, nbytes, program
from topology import compile_for_gpu, lower_for_gpu, registers_of_kernels

from mamba_jax.kernel_check.compare import WIDE, compiled_comparison
from mamba_jax.kernel_check.compiling import Compiler


@pytest.mark.full
@pytest.mark.gpu_compile
@pytest.mark.parametrize(("operation", "model", "dtype", "store"), ON_GPU)
def test_kernel(operation, model, dtype, store, tmp_path):
    if operation == "expert_mlp" and store == FP8:
        model = dataclasses.replace(model, size=model.size - model.size % 128)
    call = call_of(operation, model, dtype, store, **{"first_key": 1} if "paged_attention" in operation else {})
    stores, others = call.apart(call.arrays)
    compiled = compile_for_gpu("h200", program(call, "pallas_gpu"), stores, others, donate=0, xla_dump_to=str(tmp_path))
    memory, registers = compiled.memory_analysis(), registers_of_kernels(tmp_path)
    assert memory.alias_size_in_bytes == nbytes(stores)
    assert memory.temp_size_in_bytes <= most_temporaries(operation, call, model)
    for kernel, (most_registers, most_spilled) in kernels_of(operation, model, store).items():
        for used, spilled in registers.values() if kernel == "all" else [registers[kernel]]:
            assert used <= most_registers
            assert spilled <= most_spilled
    if "paged_attention" in operation and not model.latent:
        assert not compiled.as_text().count("while(")


def most_temporaries(operation, call, model):
    """Bytes that the program of a call may allocate."""
    match operation:
        case "expert_choice":
            return math.inf
        case "recurrence_update" if not model.erase:
            return math.inf
        case "gated_update" | "gated_replay":  # the projections' outputs in one array, and y
            given = call.arguments["projections"]
            if not model.erase:
                return 3 * (4 * nbytes(given.value) + nbytes(given.vectors)) + (1 << 16)
            return 1.1 * (2 * nbytes(given.vectors) + 5 * nbytes(given.value) + nbytes(given.decay)) + 1e5
        case "recurrence_scan" if not model.erase:  # a state for each tile, and steps and decays by head
            return 1.1 * model.tiles * 4 * math.prod(model.state_shape) + 4e6
        case "recurrence_scan":  # of 32 tokens and each head: a triangular system's solution, and scores
            width = call.arguments["entry"].value.dtype.itemsize
            of_head = 32 * (4 + width)
            if model.by_channel:  # sums of log decays, and queries and keys decayed
                of_head += model.state * (4 + 3 * width)
            return model.tiles * model.tile_size * model.heads * of_head + 4e6
        case "selective_scan":  # a state, and a sum of step sizes, for each tile
            return model.tiles * (model.state + 1) * model.inner * 4 + (1 << 20)
        case "paged_attention" | "paged_attention_part" if model.latent:
            # One program fills a multiprocessor, so there are few partial results; a prompt's tiles have none.
            return 20e6 if model.q_len < 16 else 1e6
        case "paged_attention" | "paged_attention_part":
            # Queries by kv head, and what programs found of each: no cache, no scores.
            return 100e6
        case "expert_mlp":  # what the first kernel gives the second one
            return 2 * model.tokens * model.chosen * model.size + 1024
        case _:
            return 1 << 20


def kernels_of(operation, model, store):
    """The most registers, and bytes of spilled stores, of an operation's kernels by name."""
    wide = hasattr(model, "heads") and model.state > 128
    few = getattr(model, "steps", 1) == 1
    match operation:
        case "gated_update":
            return dict.fromkeys(("gated_update", "gated_norm"), (232 if wide else 168, 0))
        case "recurrence_replay" | "gated_replay":
            most = 128 if few else 240 if operation == "recurrence_replay" and not model.erase else 255
            norm = {"gated_norm": (255, 8)} if "gated" in operation else {}
            return {operation: (most, math.inf if wide else 0), **norm}
        case "recurrence_scan" if not model.erase:
            names = "recurrence_scan_added", "recurrence_scan_passed_on", "recurrence_scan_outputs"
            return dict.fromkeys(names, (255, 256 if wide else 0))
        case "recurrence_scan":
            return dict.fromkeys(("recurrence_scan_systems", "recurrence_scan_along_rows"), (255, 0))
        case "selective_scan":
            names = "selective_scan_added", "selective_scan_passed_on", "selective_scan_outputs"
            return dict.fromkeys(names, (128, 0))
        case "expert_choice":
            return {operation: (128, 16 if model.tokens * model.experts * model.chosen > 1 << 16 else 0)}
        case "paged_attention" | "paged_attention_part":
            return {"paged_attention": (255, 0)}
        case "expert_mlp":
            return {"all": (192 if store in (jnp.int8, FP8) else 128, 0)}
        case _:
            return {operation: ({"selective_update": 96}.get(operation, 168), 0)}


@pytest.mark.smoke("operation")
@pytest.mark.parametrize("operation", ["recurrence_update", "recurrence_scan", "recurrence_replay"])
@pytest.mark.parametrize("model", [NEXT, NEMOTRON], ids=lambda model: model.name)
@pytest.mark.parametrize(("dtype", "store"), [(BF16, F32), (BF16, BF16), (F32, F32)])
def test_recurrences_are_lowered_for_cuda(operation, model, dtype, store):
    """Every operation in a kernel exists there, and the store is one buffer: without the extra of `test_kernel`."""
    call = call_of(operation, dataclasses.replace(model, rows=64, steps=4, tiles=16), dtype, store)
    text = lower_for_gpu(program(call, "pallas_gpu"), *call.apart(call.arrays), donate=0)
    assert "__gpu$xla.gpu.triton" in text or "triton_kernel_call" in text
    assert "output_operand_alias" in text


ON_A_GPU = [
    pytest.param(name, shape, id=f"{name} {shape.name}")
    for name, (_, implementations, shapes) in OPERATIONS.items()
    for shape in shapes[:2]
    if any(one.name == "pallas_gpu" for one in implementations) and name != "expert_choice"
]


@pytest.mark.gpu
@pytest.mark.parametrize("store", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["in float32", "in bfloat16"])
@pytest.mark.parametrize(("operation", "shape"), ON_A_GPU)
def test_kernel_equals_xla(operation, shape, dtype, store):
    """For rows of all classes, by `JAX_PLATFORMS=cuda pytest -m gpu`; other slots stay as they are."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    shape = dataclasses.replace(shape, rows=min(shape.rows, 16)) if hasattr(shape, "rows") else shape
    call = call_of(operation, shape, dtype, store)
    args, kwargs = call.split(call.arguments)
    if why := next(one for one in call.candidates if one.name == "pallas_gpu").why_not(args, kwargs):
        pytest.skip(why)
    found = compiled_comparison(call, "pallas_gpu", Compiler())()
    assert not found.wrong
    if BF16 not in (dtype, store):
        assert max(found.y, found.states) <= 2e-4 / WIDE
