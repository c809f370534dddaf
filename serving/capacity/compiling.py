"""Step programs compiled by the device's own compiler, without the device."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from checkpoints.errors import one_line
from mamba_jax.adapters import Adapters
from mamba_jax.config import SHARED, HybridConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import KernelChoice, StepBatch, StepPrograms, platform_options
from mamba_jax.rows import Rows
from mamba_jax.sharding import make_mesh, parameter_shardings, rows_shardings, store_shardings
from mamba_jax.store import Store
from mamba_jax.version import install_advice
from serving.capacity.targets import Target, gpu_description
from serving.config import ConfigError

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
    seconds: float = 0.0
    """That compiling took."""


def check_compiler(target: Target) -> None:
    """Raises ConfigError where the compiler for a machine is not installed."""
    gpu = target.device.platform == "gpu"
    needed = ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc") if gpu else ("libtpu",)
    if not all(map(_is_installed, needed)):
        whose, extra = ("GPU", "plan-gpu") if gpu else ("TPU", "plan")
        raise ConfigError(
            f"the {whose}'s compiler is not installed (Linux, x86-64): {install_advice(extra)}, "
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
        first = one_line(error)
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
        greedy: leave sampling out.
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
        greedy: bool = False,
        lora: tuple[int, int] | None = None,
    ) -> None:
        sharding = parameter_shardings(model.config, mesh)
        values: Any = {path: _described(leaf, sharding(path)) for path, leaf in parameters(model).items()}
        placed: Any = HybridModel.from_parameters(model.config, values)
        device = mesh.devices.flat[0]
        platform = "gpu" if device.platform in ("gpu", "cuda") else "tpu"
        # Library kernels cannot be timed without the device, so autotuning is off.
        options = {"xla_gpu_autotune_level": 0} if platform == "gpu" else {}
        self.compiler_options = platform_options(platform) | options
        self.choice = KernelChoice.parse(kernels, platform=platform, device=device)
        adapters = None if lora is None else Adapters(placed, count=lora[0], rank=lora[1], mesh=mesh, abstract=True)
        self._programs = StepPrograms(
            placed, tile_size=tile_size, source=source, mesh=mesh, kernels=self.choice, adapters=adapters, greedy=greedy
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
            memory: Any = lowered.compile(self.compiler_options).memory_analysis()
            progress(name)
            return Program(
                name,
                code=memory.generated_code_size_in_bytes,
                temporaries=memory.temp_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                seconds=time.perf_counter() - begin,
            )

        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(compile_one, name, self.lower(batch)) for name, batch in batches]
            return [job.result() for job in jobs]

    def lower(self, batch: StepBatch) -> jax.stages.Lowered:
        """The program of a batch before it is compiled."""
        with self.choice.applied():
            return self._programs.lower(self._store, self._rows, batch)


def _described(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


T = TypeVar("T")
_MORE = 3
"""Compilers share code between layers: a second layer alone may add as much as the next ten."""
Cut = tuple[int, ...]
"""Places of layers in the model's pattern."""


def layer_cuts(config: HybridConfig) -> list[Cut]:
    """Returns the cuts to compile; one of all layers if layers of one kind differ, or cuts would not be shorter."""
    places = {kind: [i for i, each in enumerate(config.pattern) if each == kind] for kind in config.pattern}
    base = [several[0] for several in places.values()]
    more = [each[1 : 1 + _MORE] for each in places.values() if len(each) > 1]
    cuts = [tuple(base), *(tuple(sorted([*base, *each])) for each in more)]
    differ = SHARED in config.pattern or config.norm_after or config.drafter is not None
    differ = differ or (config.mlp is not None and not isinstance(config.mlp.intermediate_size, int))
    return [tuple(range(len(config.pattern)))] if differ or sum(map(len, cuts)) >= len(config.pattern) else cuts


def cut_config(config: HybridConfig, cut: Cut) -> HybridConfig:
    """Returns the configuration of a model of these layers."""
    return dataclasses.replace(config, pattern="".join(config.pattern[i] for i in cut))


def cut_parameters(parameters: Mapping[str, T], cut: Cut) -> dict[str, T]:
    """Returns the parameters of these layers under their new places, and those outside of layers."""
    new = {old: place for place, old in enumerate(cut)}
    found: dict[str, T] = {}
    for path, leaf in parameters.items():
        if (block := re.match(r"blocks\.(\d+)\.", path)) is None:
            found[path] = leaf
        elif int(block[1]) in new:
            found[f"blocks.{new[int(block[1])]}.{path[block.end() :]}"] = leaf
    return found


def whole_program(config: HybridConfig, greedy: Sequence[Program], sampling: tuple[Program, Program]) -> Program:
    """Returns a program of the whole model.

    Args:
        config: the model.
        greedy: the program of each cut, without sampling.
        sampling: a program of the first cut, with and without sampling.
    """
    first, *longer = greedy
    base, *cuts = layer_cuts(config)
    kinds = [config.pattern[(set(cut) - set(base)).pop()] for cut in cuts]
    # How often what a cut adds is added in the whole model.
    times = [(config.pattern.count(kind) - 1) / (len(cut) - len(base)) for kind, cut in zip(kinds, cuts, strict=True)]

    def scaled(field: str) -> int:
        one = getattr(first, field)
        return one + round(sum(n * (getattr(each, field) - one) for n, each in zip(times, longer, strict=True)))

    return dataclasses.replace(
        first,
        code=scaled("code") + sampling[0].code - sampling[1].code,
        aliased=scaled("aliased"),
        # Layers and sampling run one after the other, and use the same memory.
        temporaries=max(each.temporaries for each in (*greedy, sampling[0])),
        seconds=sum(each.seconds for each in greedy),
    )


def compile_whole(
    config: HybridConfig,
    compiler: Callable[[Cut, bool], SlicePrograms],
    batches: Sequence[tuple[str, StepBatch]],
    progress: Callable[[str], None],
) -> tuple[tuple[Program, ...], str, list[str]]:
    """Compiles the cuts of a model.

    Args:
        config: the model.
        compiler: makes the programs of a cut, without sampling where the second argument says so.
        batches: of the programs, with their names.
        progress: told what is being done.

    Returns:
        The whole model's programs, empty if the compiler refuses one; the kernels that they use; and notes.
    """
    cuts, notes = layer_cuts(config), []
    if len(cuts) > 1:
        patterns = ", ".join(cut_config(config, cut).pattern for cut in cuts)
        notes.append(f"programs of the layers {patterns} were compiled; those of all layers follow from them")
    progress(f"compiling {len(batches) * len(cuts) + 1} programs")
    try:
        (sampled,) = compiler(cuts[0], False).compile(batches[:1], progress)
        compilers = [compiler(cut, True) for cut in cuts]
        compiled = [each.compile(batches, progress) for each in compilers]
    except jax.errors.JaxRuntimeError as error:
        # What does not fit is an answer, too.
        return (), "", ["the compiler refuses a program: " + one_line(error), *notes]
    sampling = sampled, compiled[0][0]
    programs = tuple(whole_program(config, each, sampling) for each in zip(*compiled, strict=True))
    return programs, compilers[0].choice.report(), notes
