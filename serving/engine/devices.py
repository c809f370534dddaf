"""The devices that an engine runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.model import HybridModel, parameters
from mamba_jax.sharding import Partition, make_mesh, shard_parameters
from serving.config import ConfigError, EngineConfig


def device_mesh(config: EngineConfig, model: HybridConfig) -> Mesh | None:
    """The mesh that the model is divided over; None for a single device.

    Raises:
        ConfigError: there are too few devices, or the model does not divide over as many.
    """
    shards = config.tensor_parallel_size
    if shards == 1:
        return None
    try:
        Partition.of(model, shards)
        return make_mesh(shards)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from None


def on_mesh(model: HybridModel, mesh: Mesh | None) -> HybridModel:
    """The model with every parameter where the mesh wants it; what lies there already is not copied."""
    if mesh is None:
        return model
    values = {path: leaf[...] for path, leaf in parameters(model).items()}
    return HybridModel.from_parameters(model.config, shard_parameters(values, model.config, mesh))


def own_devices(mesh: Mesh | None) -> Sequence[jax.Device] | None:
    """Those of the mesh that belong to this process; None, for the default ones, without a mesh."""
    return None if mesh is None else list(mesh.local_devices)


def least_of_all_processes(count: int) -> int:
    """The smallest of the processes' values: what they all decide by must be the same."""
    if jax.process_count() == 1:
        return count
    gathered: Any = multihost_utils.process_allgather(count)
    return int(gathered.min())


def describe(mesh: Mesh | None) -> str:
    """What the engine runs on, in words."""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    kind = device.device_kind if device.device_kind != device.platform else device.platform.upper()
    if mesh is None:
        return f"one {kind} device"
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} {kind} devices{processes}, tensor parallel (every layer divided over all of them)"
