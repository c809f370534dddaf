"""The devices that an engine runs on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mamba_jax.adapters import Adapters
from mamba_jax.config import ModelConfigError
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import TENSOR, make_mesh, members_of, replica_meshes
from serving.config import ConfigError, EngineConfig

Meshes = tuple[Mesh | None, ...]
"""The mesh of each replica. A single None means one engine on the default device."""


def device_meshes(config: EngineConfig) -> Meshes:
    """Returns the mesh of each replica.

    Raises:
        ConfigError: there are too few devices.
    """
    replicas, shards, members = config.data_parallel_size, config.tensor_parallel_size, config.context_parallel_size
    if replicas == shards == members == 1:
        return (None,)
    try:
        if replicas == 1:
            return (make_mesh(shards, members=members),)
        return tuple(replica_meshes(replicas, shards, members=members))
    except ModelConfigError as error:
        raise ConfigError(str(error)) from None


def on_mesh(model: HybridModel, mesh: Mesh | None) -> HybridModel:
    """Returns the model with every parameter placed on the mesh, and with its heads padded if they do not divide.

    Parameters that are already there are not copied.
    """
    if mesh is None:
        return model
    padding = HeadPadding.of(model.config, mesh.shape[TENSOR])
    values = {path: leaf[...] for path, leaf in parameters(model).items()}
    return HybridModel.from_parameters(padding.padded, padding.values(values, mesh))


def own_devices(meshes: Sequence[Mesh | None]) -> Sequence[jax.Device] | None:
    """Returns the devices of all meshes that belong to this process; None (the default device) without a mesh."""
    found = [device for mesh in meshes if mesh is not None for device in mesh.local_devices]
    return found or None


def adapters_of(
    config: EngineConfig, model: HybridModel, mesh: Mesh | None, *, abstract: bool = False
) -> Adapters | None:
    """Allocates memory for adapters on the model's devices, or only describes it. Returns None without enable_lora."""
    if not config.enable_lora:
        return None
    kinds = {"experts": config.lora_experts, "magnitudes": config.enable_dora, "tables": config.lora_tables}
    return Adapters(model, count=config.max_loras, rank=config.max_lora_rank, mesh=mesh, abstract=abstract, **kinds)


def least_of_all_processes(count: int) -> int:
    """Returns the smallest of the processes' values, because all processes must make the same decisions."""
    if jax.process_count() == 1:
        return count
    gathered: Any = multihost_utils.process_allgather(count)
    return int(gathered.min())


def of_first_process(value: Any) -> Any:
    """Returns what process 0 gives, anything that JSON has, on every process."""
    text = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    line = np.frombuffer(text.ljust(size), np.uint8)[:size]
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(line)).astype(np.uint8).tobytes())


def scheduler_clock(*, led: bool) -> Callable[[], float]:
    """Returns the clock of marks. It stands still if each of several processes schedules for itself: their clocks
    differ, and they must evict the same states."""
    return time.monotonic if led or jax.process_count() == 1 else lambda: 0.0


def describe(meshes: Sequence[Mesh | None]) -> str:
    """Returns the devices of the engine, or of each replica, in words."""
    mesh = meshes[0]
    replicas = f"{len(meshes)} replicas, each on " if len(meshes) > 1 else ""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    kind = device.device_kind if device.device_kind != device.platform else device.platform.upper()
    if mesh is None or mesh.size == 1:
        return f"{replicas}one {kind} device"
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    if (members := members_of(mesh)) > 1:
        divided = f"keys and values over {members} members, every layer over each member's {mesh.shape[TENSOR]}"
        return f"{replicas}{mesh.size} {kind} devices{processes}, context parallel ({divided})"
    return f"{replicas}{mesh.size} {kind} devices{processes}, tensor parallel (every layer divided over all of them)"
