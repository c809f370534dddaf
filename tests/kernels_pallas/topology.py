"""Compiling for accelerators that are not there.

TPU: libtpu (PyPI, Linux x86-64) brings the real compiler, which needs a description of a slice and no slice. It would
ask a metadata server what machine this is; the settings below answer for it. They also let several processes load it.
GPU: JAX lowers Triton kernels without one; JAX 0.12 wants to be told what device to think of.
"""

import contextlib
import functools
import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

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
        pytest.skip("libtpu is not installed (pip install mamba-jax[plan])")
    from jax.experimental import topologies

    for setting, value in SETTINGS.items():
        os.environ.setdefault(setting, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=SLICES[name]).devices


def compile_for_tpu(name: str, operation, *arguments, donate: int | None = None) -> jax.stages.Compiled:
    """`operation` compiled for one TPU, for arguments of these shapes; `donate` is the number of the donated one."""
    device = tpu_devices(name)[0]
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place), arguments)
    # Some of Pallas' lowering asks for the kind of TPU: of the mesh, or else of the machine at hand.
    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        return jax.jit(operation, donate_argnums=() if donate is None else donate).lower(*placed).compile()


def lower_for_gpu(operation, *arguments, donate: int | None = None) -> str:
    """`operation` lowered for CUDA, as text."""
    with _pretend_gpu():
        traced = jax.jit(operation, donate_argnums=() if donate is None else donate).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _pretend_gpu():
    try:
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))
    except (ImportError, TypeError):  # older JAX: does not ask
        return contextlib.nullcontext()
