"""One collective of each kind over all devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.kernel_check.compare import Timed
from serving.check.report import Report

NUMBERS, CALLS = 1 << 20, 20
"""Numbers of bfloat16 that a device has, and calls in one program."""


def time_collectives(report: Report) -> None:
    """Reports the time of each kind; nothing on one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return
    mesh = Mesh(np.array(devices), ("device",))
    count, own = len(devices), NamedSharding(mesh, PartitionSpec("device"))
    to_next = [(each, (each + 1) % count) for each in range(count)]
    kinds: dict[str, Callable[[jax.Array], Any]] = {
        "psum": lambda x: jax.lax.psum(x, "device") / count,
        "all_gather": lambda x: jax.lax.all_gather(x, "device")[0],
        "psum_scatter": lambda x: jnp.tile(jax.lax.psum_scatter(x, "device", tiled=True), count),
        "all_to_all": lambda x: jax.lax.all_to_all(x.reshape(count, -1), "device", 0, 0).reshape(-1),
        "ppermute": lambda x: jax.lax.ppermute(x, "device", to_next),
    }
    size = NUMBERS // count * count
    array = jax.ShapeDtypeStruct((count * size,), jnp.bfloat16, sharding=own)
    make = jax.jit(lambda: jnp.ones(array.shape, array.dtype), out_shardings=own)
    for kind, run in kinds.items():

        def each(x: jax.Array, rest: Any, run: Callable[[jax.Array], Any] = run) -> Any:
            body = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec("device"))
            return jax.lax.fori_loop(0, CALLS, lambda step, v: jax.lax.optimization_barrier(body(v)), x), rest

        loop = jax.jit(each, donate_argnums=0).lower(array, ()).compile()
        us = Timed(lambda: (make(), ()), loop, CALLS, 2 * size).seconds() * 1e6
        report.add("collective", kind=kind, devices=count, us=round(us, 1), MB=round(2 * size / 1e6, 2))
