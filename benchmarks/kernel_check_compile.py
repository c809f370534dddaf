"""How much CPU time a TPU's compiler takes for the programs of the check of kernels at start, without the TPU.

python -m benchmarks.kernel_check_compile nemotron-h-8b --topology v6e:2x2
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from checkpoints.load import load_config
from mamba_jax.kernel_check.calls import calls_of, with_kernels
from mamba_jax.kernel_check.compare import calls_for, comparison, timing
from mamba_jax.kernel_check.values import Values
from serving.capacity.compiling import slice_mesh
from serving.capacity.targets import target
from serving.engine.assembly.kernel_check_child import BANDWIDTH, LOOP, MOST, checked_sizes


def main() -> None:
    """Compiles one program after the other; prints the CPU seconds of each, their sum and the most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--topology", default="v6e:2x2")
    options = parser.parse_args()
    device = slice_mesh(target(options.topology)).devices.flat[0]
    found = []
    sizes = checked_sizes(tile_size=128, page_size=128)
    for call, kernel in with_kernels(calls_of(load_config(options.model), "tpu", sizes), "tpu"):
        seed = (jax.ShapeDtypeStruct((), jnp.uint32),)
        programs: list[tuple[Any, Any, dict[str, Any]]] = [(comparison(call, kernel), seed, {})]
        calls = calls_for(LOOP, Values(call, classes=False).moved / BANDWIDTH, MOST)
        for name in (kernel, call.plain):
            make, loop = timing(call, name, calls=calls)
            programs.append((loop, jax.eval_shape(make), {"donate_argnums": 0}))
        seconds = [_seconds(device, *program) for program in programs]
        found += seconds
        print(f"{call.label}: {kernel}, " + ", ".join(f"{each:.1f} s" for each in seconds), flush=True)
    print(f"{len(found)} programs: {sum(found):.0f} s of one CPU, the longest {max(found):.1f} s")


def _seconds(device: jax.Device, function: Any, shapes: Any, options: dict[str, Any]) -> float:
    place = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
    begin = time.process_time()
    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        jax.jit(function, **options).lower(*placed).compile()
    return time.process_time() - begin


if __name__ == "__main__":
    main()
