"""Step programs compiled for machines that are not at hand, and figures that the compiler does not sum up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from checkpoints.load import load_config
from checkpoints.placing import abstract_parameters
from checkpoints.quantized.rounding import Selection
from mamba_jax.adapters import Adapters
from mamba_jax.config import SHARED, AttentionConfig, HybridConfig, MambaConfig
from mamba_jax.config.channel_recurrence import Mamba1Config
from mamba_jax.config.linear_recurrence import LightningConfig
from mamba_jax.families import weight_names
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepBatch
from mamba_jax.rows import init_rows
from mamba_jax.sharding import TENSOR, Partition
from mamba_jax.store import StoreShape, init_store
from serving.capacity.compiling import Program, SlicePrograms, check_compiler, slice_mesh
from serving.capacity.targets import Target, target
from serving.config import ConfigError
from tests.support.hlo_traffic import COLLECTIVES, Traffic, sums_of_devices


@dataclass(frozen=True, kw_only=True)
class MeasuredProgram(Program):
    """Of a TPU's program bytes, of a GPU's launches and kernels; all for a greedy step on one device."""

    traffic: Traffic
    """Bytes to and from the device's memory, keys and values aside, and between devices."""
    weights: int
    """Bytes that read weights, and that write and read copies of weights."""
    collectives: dict[str, int]
    """How often devices exchange something, by kind."""
    launches: dict[str, int] | None
    """What the host launches, by kind of thunk; `kCommandBuffer` is a CUDA graph."""
    kernels: int
    """Those inside a loop or a conditional are not counted."""
    sums_by_xla: int
    """Products, and sums of floats along an axis or of devices (`sums_of_devices`), that are in no kernel."""
    sums_in_copies: int
    """Fusions of a GPU's program that write a concatenation and add numbers up, each sum in one thread."""


@dataclass(frozen=True)
class CompiledStep:
    """A step program and the sizes of its store on one device."""

    program: MeasuredProgram
    kernels: str
    """How operations run."""
    partition: Partition
    states: int
    """Bytes of all slots."""
    pages: int
    """Bytes of all pages."""


def few_layers(model: str, pattern: str, vocab_size: int = 1024) -> HybridConfig:
    """A published model with these sublayers only, and without draft layers."""
    return replace(load_config(model), pattern=pattern, mtp_pattern="", vocab_size=vocab_size)


def narrow_parameters(config: HybridConfig, partition: Partition, kind: str) -> dict:
    """A model's parameters without values, as `--quantization KIND` leaves them, divided over a partition's devices."""
    mesh = AbstractMesh((partition.shards,), (TENSOR,))
    return Selection(config, weight_names(config), kind).parameters(
        abstract_parameters(config, jnp.bfloat16), lambda path: NamedSharding(mesh, partition.parameter(path))
    )


def compilable(topology: str) -> Target:
    """The machine; skips the test where the compiler for it is not installed."""
    machine = target(topology)
    try:
        check_compiler(machine)
    except ConfigError as error:
        pytest.skip(str(error))
    return machine


def compile_step(
    config: HybridConfig,
    topology: str,
    batch: StepBatch,
    *,
    store: dict[str, Any],
    seats: dict[str, Any],
    parameters: dict | None = None,
    tile_size: int = 128,
    source: Any = None,
    lora: tuple[int, int] | None = None,
    greedy: bool = True,
    kernels: str = "auto",
    members: int = 1,
) -> CompiledStep:
    """Compiles the program of a batch.

    Args:
        store: arguments of `init_store`.
        seats: arguments of `init_rows`.
        parameters: without values; None: in bfloat16.
        source: of drafts.
        greedy: leave out sampling, which takes over a third of the compiler's time.
        kernels: what operations run by, as the engine's flag says it.
        members: over which pages are divided.
    """
    machine = compilable(topology)
    partition = Partition.of(config, machine.count // members, members)
    shape = StoreShape.of(config, routed_experts=store.get("routed_experts", False))
    programs = SlicePrograms(
        HybridModel.from_parameters(config, parameters or abstract_parameters(config, jnp.bfloat16)),
        slice_mesh(machine, members),
        store=jax.eval_shape(partial(init_store, partition.store_shape(shape), dtype=jnp.bfloat16, **store)),
        rows=jax.eval_shape(partial(init_rows, config, source=source, **seats)),
        tile_size=tile_size,
        source=source,
        adapters=lambda model, mesh: lora and Adapters(model, count=lora[0], rank=lora[1], mesh=mesh, abstract=True),
        greedy=greedy,
        kernels=kernels,
    )
    program, device = measured(programs, batch), partition.device_shape(shape)
    states = store["num_slots"] * device.bytes_per_slot(jnp.bfloat16)
    page = device.bytes_per_page(store["page_size"], store.get("kv_dtype", jnp.bfloat16))
    pages = store["num_pages"] // members * page
    return CompiledStep(program, programs.choice.report(), partition, states, pages)


def measured(programs: SlicePrograms, batch: StepBatch, name: str = "step") -> MeasuredProgram:
    """Compiles the program of a batch and reads its text."""
    gpu = "xla_gpu_autotune_level" in programs.compiler_options
    # Kernels are not compiled alone first: the program does not compile with one that fails.
    with mock.patch("kernels_pallas.dispatch._try", return_value=None):
        lowered = programs.lower(batch)
    with TemporaryDirectory() as dump:
        # Without LLVM's passes, the assembler would have twice as much to do.
        options = {"xla_dump_to": dump, "xla_backend_optimization_level": 1} if gpu else {}
        compiled = lowered.compile(programs.compiler_options | options)
        launches = _launches(Path(dump)) if gpu else None
    memory: Any = compiled.memory_analysis()
    text, given = compiled.as_text() or "", lowered.as_text()
    # Fusions, the library's kernels and our own, and copies.
    kernels = len(re.findall(r" (?:fusion|custom-call|copy)\(", text[text.find("\nENTRY ") :]))
    copies = re.findall(r"^%fused_concatenate.*?^}", text, re.MULTILINE | re.DOTALL)
    sums = r"stablehlo.dot_general|applies stablehlo.add across .*f32"
    traffic = Traffic(text)
    return MeasuredProgram(
        name,
        memory.generated_code_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        traffic=traffic,
        weights=traffic.of_arguments(r"weights\[\d+\]"),
        collectives=traffic.count(COLLECTIVES),
        launches=launches,
        kernels=kernels,
        sums_by_xla=len(re.findall(sums, given)) + len(sums_of_devices(text)),
        sums_in_copies=sum(" reduce(" in copy for copy in copies),
    )


def _launches(dump: Path) -> dict[str, int]:
    """The launches of the host, by kind of thunk, from the folder that XLA:GPU wrote to (`xla_dump_to`)."""
    # Helper modules, such as kernels that were compiled by themselves, have sequences of their own.
    sequences = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    text = max(sequences, key=lambda path: path.stat().st_size).read_text()
    # Thunks inside a graph, a loop or a branch are indented.
    return dict(Counter(re.findall(r"^\d+: (k\w+)", text, re.MULTILINE)))


def least_collectives(config: HybridConfig, partition: Partition) -> dict[str, int]:
    """How often devices have to tell each other something in a step without drafts of the model's own.

    `sums` of hidden states (one for each mixer, one for the embedding), `norms` of numbers that devices add up inside
    of a mixer, and the `largest` logits of each device's part of the vocabulary, collected once.
    """
    if partition.shards == 1:
        return {"sums": 0, "norms": 0, "largest": 0}
    # A shared block has attention, an MLP and a projection in addition to its Mamba mixer.
    sums = sum(4 if kind == SHARED else 1 for kind in config.pattern)
    vocabulary = TENSOR in partition.parameter("embed.weight")
    norms = sum(_sums_inside(config.mixer(kind), partition.shards) for kind in config.pattern)
    return {"sums": sums + vocabulary, "norms": norms, "largest": int(vocabulary)}


def _sums_inside(mixer: Any, shards: int) -> bool:
    """Whether devices add up numbers inside of a mixer: squares for a norm, or results of small projections."""
    match mixer:
        case AttentionConfig():
            return mixer.qk_norm is not None and mixer.qk_norm.all_heads
        case MambaConfig():
            return mixer.norm and mixer.num_groups % shards > 0
        case LightningConfig() | Mamba1Config():
            return True
    return any(_sums_inside(each, shards) for _, each in getattr(mixer, "mixers", ()))
