"""Descriptions of a model's parameters, weights in few bits: for compilers, no numbers needed."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from checkpoints.placing import abstract_parameters
from checkpoints.quantized.rounding import Selection
from mamba_jax.config import HybridConfig
from mamba_jax.families import weight_names
from mamba_jax.sharding import TENSOR, Partition


def narrow_parameters(config: HybridConfig, partition: Partition, kind: str) -> dict:
    """As `--quantization KIND` leaves them, divided over a partition's devices."""
    mesh = AbstractMesh((partition.shards,), (TENSOR,))
    return Selection(config, weight_names(config), kind).parameters(
        abstract_parameters(config, jnp.bfloat16), lambda path: NamedSharding(mesh, partition.parameter(path))
    )
