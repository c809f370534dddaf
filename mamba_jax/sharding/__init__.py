"""Tensor parallelism: one model over several devices, each holding a piece of every layer and of every state.

Heads of Mamba and attention, the inner widths of MLPs, experts and the vocabulary are divided over one mesh axis. A
mixer then runs on every device with its own pieces only and gives a partial sum; adding these up is the only
communication of a sublayer (`across`). What lies between mixers is the same on all devices.
"""

from mamba_jax.sharding.axis import CONTEXT, TENSOR, make_mesh, members_of, replica_meshes, replicated, use_mesh
from mamba_jax.sharding.partition import (
    Partition,
    parameter_shardings,
    shard_parameters,
    sharded_store,
    store_shardings,
)
