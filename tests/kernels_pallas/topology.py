"""Compiling for accelerators that are not there.

TPU: libtpu (PyPI, Linux x86-64) brings the real compiler, which needs a description of a slice and no slice.
GPU: JAX lowers Triton kernels without one; JAX 0.12 wants to be told what device to think of.
"""

import functools
import importlib.util
import os
import re
import subprocess

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding, use_abstract_mesh

from serving.capacity.compiling import slice_mesh
from tests.support import cpu_options
from tests.support.compiled_programs import compilable

SLICES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@functools.cache
def described_device(name: str):
    """A TPU of a slice in SLICES or a GPU, described to its compiler; skips the test where that is not installed."""
    return slice_mesh(compilable(SLICES.get(name, f"{name}-1"))).devices.flat[0]


def compile_for_tpu(
    name: str, operation, *arguments, donate: int | tuple[int, ...] = (), **options
) -> jax.stages.Compiled:
    """`operation` compiled for one device, for arguments of these shapes; `donate` are the numbers of the donated ones,
    `options` are the compiler's."""
    device = described_device(name)
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place), arguments)
    # Some of Pallas' lowering asks for the kind of TPU: of the mesh, or else of the machine at hand.
    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        return jax.jit(operation, donate_argnums=donate).lower(*placed).compile(options)


def compile_for_gpu(name: str, operation, *arguments, **options) -> jax.stages.Compiled:
    """As `compile_for_tpu`."""
    if "xla_dump_to" in options and not cpu_options.EXIST:
        # XLA of JAX 0.12 writes the code of these kernels only. That of 0.10 would also write all their passes, and do
        # so for all later programs of the process: seconds for each.
        options["xla_dump_emitter_re"] = ".*"
    # Library kernels cannot be tried out without the device. Of LLVM, tests see what it optimizes.
    options = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 3, **options}
    return compile_for_tpu(name, operation, *arguments, **options)


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
