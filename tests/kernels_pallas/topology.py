"""Compiling for accelerators that are not there.

TPU: libtpu (PyPI, Linux x86-64) brings the real compiler, which needs a description of a slice and no slice. It would
ask a metadata server what machine this is; the settings below answer for it. They also let several processes load it.
GPU: JAX lowers Triton kernels without one; JAX 0.12 wants to be told what device to think of.
"""

import functools
import importlib.util
import os
import re
import subprocess

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding, use_abstract_mesh

from serving.capacity.compiling import check_compiler, slice_mesh
from serving.capacity.targets import target
from serving.config import ConfigError
from tests.support import emitters

SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
SLICES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@functools.cache
def tpu_devices(name: str):
    """The devices of a slice of TPUs called `name` in SLICES; skips the test where there is no compiler for them."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install '.[plan]')")
    from jax.experimental import topologies

    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=SLICES[name]).devices


def compile_for_tpu(name: str, operation, *arguments, donate: int | tuple[int, ...] = ()) -> jax.stages.Compiled:
    """`operation` compiled for one TPU, for arguments of these shapes; `donate` are the numbers of the donated ones."""
    device = tpu_devices(name)[0]
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place), arguments)
    # Some of Pallas' lowering asks for the kind of TPU: of the mesh, or else of the machine at hand.
    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        return jax.jit(operation, donate_argnums=donate).lower(*placed).compile()


@functools.cache
def gpu_device(name: str):
    """A GPU called `name`, described to XLA's compiler; skips the test where that is not installed."""
    machine = target(f"{name}-1")
    try:
        check_compiler(machine)
    except ConfigError as error:
        pytest.skip(str(error))
    return slice_mesh(machine).devices.flat[0]


def compile_for_gpu(
    name: str, operation, *arguments, donate: int | tuple[int, ...] = (), **options
) -> jax.stages.Compiled:
    """`operation` compiled for one GPU, as `compile_for_tpu`; `options` are the compiler's."""
    if "xla_dump_to" in options and not emitters.EXIST:
        # XLA of JAX 0.12 writes the code of these kernels only. That of 0.10 would also write all their passes, and do
        # so for all later programs of the process: seconds for each.
        options["xla_dump_emitter_re"] = ".*"
    device = gpu_device(name)
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place), arguments)
    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        lowered = jax.jit(operation, donate_argnums=donate).lower(*placed)
        # Library kernels cannot be tried out without the device. Of LLVM, tests see what it optimizes.
        return lowered.compile({"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 3, **options})


def registers_of_kernels(folder) -> dict[str, tuple[int, int]]:
    """Registers and bytes of spilled stores of every kernel that XLA wrote to `folder` (`xla_dump_to`), by name."""
    (nvcc,) = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations
    found = {}
    for ptx in folder.glob("*.ptx"):
        if ".version" not in ptx.read_text():
            continue  # a module without kernels
        command = [f"{nvcc}/bin/ptxas", "-v", "--gpu-name", "sm_90a", "-o", os.devnull, str(ptx)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        names = re.findall(r"Compiling entry function '(\w+)'", said)
        spilled = re.findall(r"(\d+) bytes spill stores", said)
        used = re.findall(r"Used (\d+) registers", said)
        found |= {name: (int(u), int(s)) for name, u, s in zip(names, used, spilled, strict=True)}
    return found


def lower_for_gpu(operation, *arguments, donate: int | tuple[int, ...] = ()) -> str:
    """`operation` lowered for CUDA, as text."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        traced = jax.jit(operation, donate_argnums=donate).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()
