"""Step programs compiled by the device's own compiler, without the device."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from checkpoints.errors import one_line
from mamba_jax.adapters import Adapters
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import KernelChoice, StepBatch, StepPrograms, platform_options
from mamba_jax.rows import Rows, rows_shardings
from mamba_jax.sharding import make_mesh, parameter_shardings, store_shardings
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
    try:
        installed = all(map(importlib.util.find_spec, needed))
    except ModuleNotFoundError:  # the package that a module is in
        installed = False
    if not installed:
        whose, extra = ("GPU", "plan-gpu") if gpu else ("TPU", "plan")
        raise ConfigError(
            f"the {whose}'s compiler is not installed (Linux, x86-64): {install_advice(extra)}, "
            "or add --analysis to plan by arithmetic only"
        )


def slice_mesh(target: Target, members: int = 1) -> Mesh:
    """Returns the devices of a machine, described for its compiler. `members`: as for `make_mesh`.

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
        raise ConfigError(f"topology {target.name!r}: its compiler says: {one_line(error)}") from None
    return make_mesh(target.count // members, found, members=members)


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
        adapters: returns the described adapters of a model, or None.

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
        adapters: Callable[[HybridModel, Mesh], Adapters | None] = lambda model, mesh: None,
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
        self._programs = StepPrograms(
            placed, tile_size=tile_size, source=source, mesh=mesh, kernels=self.choice,
            adapters=adapters(placed, mesh), greedy=greedy,
        )  # fmt: skip
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
