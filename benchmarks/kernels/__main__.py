"""Time of each operation by each of its implementations, at the sizes of `benchmarks.kernels.workloads`.

    python -m benchmarks.kernels                                   # everything this machine can run
    python -m benchmarks.kernels --operations recurrence_scan --shapes nemotron --dtype bfloat16
    python -m benchmarks.kernels --operations recurrence_update,recurrence_replay   # every state kept, and replayed

`gb_per_s` is the bytes that must move at least (`moved_mb`), over the time: the machine's bandwidth says how good that
is. An implementation that cannot run a shape is named with its reason. Times are medians of `--reps` runs of several
calls.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.call import Call, Draw
from benchmarks.kernels.calls import OPERATIONS, drawn, runnable
from kernels_pallas.dispatch import UnsupportedError
from serving.bench.plot import bars, check_plot
from serving.bench.report import emit, environment, median, spread


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="some of them, with commas between")
    parser.add_argument("--implementations", default="", help="names, with commas between; by default all that can run")
    parser.add_argument("--shapes", default="", help="only shapes with this in their names")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--small", action="store_true", help="sizes of the tests, to see that it works")
    parser.add_argument("--interpreted", action="store_true", help="also kernels by Pallas' interpreter (very slow)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each repetition, about")
    parser.add_argument("--plot", help="a PNG or SVG file to draw (needs matplotlib)")
    options = parser.parse_args(arguments)
    names = [name for name in options.operations.split(",") if name]
    if unknown := sorted(set(names) - set(OPERATIONS)):
        parser.error(f"--operations {', '.join(unknown)}: known are {', '.join(OPERATIONS)}")
    wanted = [name for name in options.implementations.split(",") if name]
    check_plot(options.plot)
    emit(**environment("none: operations alone"))
    drawn: dict[str, list[float]] = {}
    for name in names:
        for line in measure(name, wanted, options):
            emit(**line)
            if "each_us" in line:
                drawn[f"{name}, {line['shape']}: {line['implementation']}"] = line["each_us"]
    if options.plot and drawn:
        bars(drawn, options.plot, title=f"microseconds, {options.dtype}", log=True)
    return 0


def measure(name: str, wanted: Sequence[str], options: argparse.Namespace) -> Any:
    """One line for each shape and implementation of an operation."""
    operation = OPERATIONS[name]
    for shape in operation.shapes:
        empty = any(size == 0 and not isinstance(size, bool) for size in vars(shape).values())
        if options.shapes not in shape.name or empty:
            continue
        call = drawn(name, shape.small() if options.small else shape, Draw(options.dtype))
        for implementation in runnable(operation, jax.default_backend(), options.interpreted):
            if wanted and implementation not in wanted:
                continue
            line = {"metric": name, "shape": shape.name, "implementation": implementation, "dtype": options.dtype}
            try:
                times = time_call(call, implementation, reps=options.reps, seconds=options.seconds)
            except UnsupportedError as error:
                yield line | {"unsupported": str(error)}
                continue
            each = [round(one * 1e6, 2) for one in times]
            speed = round(call.moved / median(times) / 1e9, 2)
            found = {"v": median(each), "each_us": each, "spread": spread(each), "gb_per_s": speed}
            yield line | found | {"moved_mb": round(call.moved / 1e6, 3)}


def time_call(call: Call, implementation: str, *, reps: int, seconds: float) -> list[float]:
    """Seconds of one call, once for each repetition. Stores are donated and come back, as in a step."""
    compiled = jax.jit(call.program(implementation), donate_argnums=0)
    stores = jax.tree.map(jnp.copy, call.stores)  # the call's own are for the next implementation

    def calls(count: int, stores: Any) -> tuple[float, Any]:
        begin = time.perf_counter()
        for _ in range(count):
            stores, y = compiled(stores, call.inputs, call.places)
        jax.block_until_ready((y, stores))
        return time.perf_counter() - begin, stores

    _, stores = calls(1, stores)
    once, stores = calls(1, stores)
    count = max(1, round(seconds / max(once, 1e-9)))
    found = []
    for _ in range(reps):
        took, stores = calls(count, stores)
        found.append(took / count)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
