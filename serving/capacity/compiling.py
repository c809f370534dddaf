"""Step programs compiled by the device's own compiler, without the device."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from mamba_jax.adapters import Adapters
from mamba_jax.compiler_options import compiler_options
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import KernelChoice, StepBatch, StepPrograms
from mamba_jax.rows import Rows
from mamba_jax.sharding import make_mesh, parameter_shardings, rows_shardings, store_shardings
from mamba_jax.store import Store
from serving.capacity.gpu_description import gpu_description
from serving.capacity.targets import Target
from serving.capacity.traffic import Traffic
from serving.config import ConfigError

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_WEIGHTS = r"weights\[\d+\]"
"""Names of the weight arguments of a step program."""

# Keep libtpu from querying a metadata server and from locking the TPU: programs are compiled here, not run.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Program:
    """The compiler's figures for one step program, per device."""

    name: str
    code: int
    """Bytes of the program itself, which stay in the device's memory."""
    temporaries: int
    """Bytes while it runs."""
    aliased: int
    """Bytes that are updated in place: those of the store, or something has been copied."""
    moved: int = 0
    """Bytes to and from the device's memory in a greedy step, keys and values aside; see `Traffic`. 0 for a GPU, whose
    kernels do not say what they move."""
    weights: int = 0
    """The part of these bytes that reads weights, and that writes and reads copies of weights."""
    collectives: dict[str, int] = field(default_factory=dict)
    """How often devices exchange something in a greedy step, by kind."""
    arriving: tuple[int, ...] = ()
    """Of a TPU's program: bytes on their way to the chip's own memory during each of these exchanges, mostly weights of
    the next projection."""
    launches: dict[str, int] = field(default_factory=dict)
    """On a GPU: what the host launches in a step, by kind of thunk; `kCommandBuffer` is a CUDA graph. A step in which
    the host launches nothing but one graph has `{"kCommandBuffer": 1}`."""
    kernels: int = 0
    """On a GPU: how many kernels a step runs; those inside a loop or a conditional are not counted."""
    seconds: float = 0.0
    """That compiling took."""


def code_of_all(programs: Sequence[Program], kinds: Sequence[str]) -> int:
    """Returns an upper bound on the bytes of an engine's programs, of which only some are compiled.

    Others count as the largest compiled one of their kind, because narrower programs are smaller. If none of the kind
    is compiled, they count as the largest of each other kind together: a mixed program has the operations of both.

    Args:
        programs: the compiled ones; 0 bytes without any.
        kinds: the kind of every program of the engine; see `buckets.kind_of`.
    """
    largest: dict[str, int] = {}
    for program in programs:
        kind = program.name.split(",")[0]
        largest[kind] = max(largest.get(kind, 0), program.code)
    counted = Counter(kinds) - Counter(program.name.split(",")[0] for program in programs)
    others = sum(count * largest.get(kind, sum(largest.values())) for kind, count in counted.items())
    return sum(program.code for program in programs) + others if programs else 0


def check_compiler(target: Target) -> None:
    """Raises ConfigError where the compiler for a machine is not installed."""
    gpu = target.device.platform == "gpu"
    needed = ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc") if gpu else ("libtpu",)
    if not all(map(_is_installed, needed)):
        whose, extra = ("GPU", "plan-gpu") if gpu else ("TPU", "plan")
        raise ConfigError(
            f"the {whose}'s compiler is not installed: pip install '.[{extra}]' (Linux, x86-64), "
            "or add --analysis to plan by arithmetic only"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def slice_mesh(target: Target) -> Mesh:
    """The devices of a machine, as far as a compiler has to know them.

    Raises:
        ConfigError: the compiler does not know such a machine.
    """
    assert target.topology is not None
    kind, shape = target.topology.split(":")
    try:
        if target.device.platform == "gpu":
            jax.devices()  # the compiler's plugin registers with the first backend
            described = {"target_config": gpu_description(kind), "topology": shape}
            found = topologies.get_topology_desc(platform="cuda", **described).devices
        else:
            for name, value in _ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise ConfigError(f"topology {target.name!r}: its compiler says: {first}") from None
    return make_mesh(target.count, found)


class SlicePrograms:
    """Compiles step programs of a model without weights, over a store without memory.

    Args:
        model: as `HybridModel.abstract` makes it.
        mesh: the devices of the slice.
        store, rows: shapes, as `jax.eval_shape` gives them.
        tile_size: of prefill batches.
        source: of drafts.
        kernels: what operations run by, as the engine's flag says it.
        lora: number and rank of LoRA adapters; None for programs without.

    Raises:
        UnsupportedError: `kernels` is not written as it should be.
    """

    def __init__(
        self,
        model: HybridModel,
        mesh: Mesh,
        *,
        store: Store,
        rows: Rows,
        tile_size: int,
        source: Any = None,
        kernels: str = "auto",
        lora: tuple[int, int] | None = None,
    ) -> None:
        sharding = parameter_shardings(model.config, mesh)
        values: Any = {path: _described(leaf, sharding(path)) for path, leaf in parameters(model).items()}
        placed: Any = HybridModel.from_parameters(model.config, values)
        device = mesh.devices.flat[0]
        self._gpu = device.platform in ("gpu", "cuda")
        self.choice = KernelChoice.parse(kernels, platform="gpu" if self._gpu else "tpu", device=device)
        adapters = None if lora is None else Adapters(placed, count=lora[0], rank=lora[1], mesh=mesh, abstract=True)
        self._programs = StepPrograms(
            placed, tile_size=tile_size, source=source, mesh=mesh, kernels=self.choice, adapters=adapters
        )
        self._store = jax.tree.map(_described, store, store_shardings(store, model.config, mesh))
        self._rows = jax.tree.map(_described, rows, rows_shardings(rows, mesh))

    def compile(self, batches: Sequence[tuple[str, StepBatch]], progress: Callable[[str], None]) -> list[Program]:
        """Compiles the program for each named batch, two at a time.

        Raises:
            jax.errors.JaxRuntimeError: the compiler refuses one, for example because it does not fit in memory.
        """

        def compile_one(name: str, lowered: jax.stages.Lowered) -> Program:
            begin = time.perf_counter()
            if self._gpu:
                with TemporaryDirectory() as dump:
                    # Library kernels cannot be timed without the device, so autotuning is off.
                    options = {"xla_gpu_autotune_level": 0, "xla_dump_to": dump}
                    compiled = lowered.compile(compiler_options("gpu") | options)
                    program = _summary(name, compiled, begin, launches=count_launches(Path(dump)))
            else:
                program = _summary(name, lowered.compile(compiler_options("tpu")), begin)
            progress(name)
            return program

        with ThreadPoolExecutor(2) as pool:
            jobs = []
            for name, batch in batches:
                with self.choice.applied():
                    lowered = self._programs.lower(self._store, self._rows, batch)
                jobs.append(pool.submit(compile_one, name, lowered))
            return [job.result() for job in jobs]


def count_collectives(text: str) -> dict[str, int]:
    """How often a compiled program (as text) has devices exchange something in a greedy step, by kind."""
    return Traffic(text).count(COLLECTIVES)


def count_launches(dump: Path) -> dict[str, int]:
    """The launches of the host in one run of a program, by kind of thunk.

    Args:
        dump: the folder that XLA:GPU wrote to while it compiled the program (`xla_dump_to`).

    Raises:
        FileNotFoundError: the folder has no sequence of thunks.
    """
    sequences = list(dump.glob("*thunk_sequence_after_thunk_passes.txt"))
    if not sequences:
        raise FileNotFoundError(f"XLA wrote no sequence of thunks to {dump}")
    # Helper modules, such as kernels that were compiled by themselves, have sequences of their own.
    text = max(sequences, key=lambda path: path.stat().st_size).read_text()
    # Thunks inside a graph, a loop or a branch are indented.
    return dict(Counter(re.findall(r"^\d+: (k\w+)", text, re.MULTILINE)))


def count_kernels(text: str) -> int:
    """How many kernels a program compiled for GPU (as text) launches: fusions, the library's and our own, copies."""
    return len(re.findall(r" (?:fusion|custom-call|copy)\(", text[text.find("\nENTRY ") :]))


def _summary(
    name: str, compiled: jax.stages.Compiled, begin: float, *, launches: dict[str, int] | None = None
) -> Program:
    """`launches`: of a program for GPU."""
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    traffic = Traffic(text) if launches is None else None
    return Program(
        name=name,
        code=memory.generated_code_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        moved=0 if traffic is None else traffic.total(),
        weights=0 if traffic is None else traffic.of_arguments(_WEIGHTS),
        collectives=count_collectives(text),
        arriving=() if traffic is None else tuple(traffic.arriving(COLLECTIVES)),
        launches=launches or {},
        kernels=0 if launches is None else count_kernels(text),
        seconds=time.perf_counter() - begin,
    )


def _described(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
