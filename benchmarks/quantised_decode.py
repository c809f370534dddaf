"""A decode step of one row with quantized weights, compared with float32 and bfloat16, in turns.

    python -m benchmarks.quantised_decode mamba2-370m --kinds int8

Random weights; only the compiled decode program, after a prompt of 64 tokens. int8 weights are measured with
activations in float32 and in bfloat16. Medians over the turns, and the ratio of the fastest turns, which is steadier on
a busy machine.
"""

from __future__ import annotations

import argparse
import time

from checkpoints.load import load_model
from serving.bench.drafts import stepper
from serving.bench.report import emit, environment, median, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kinds", default="int8")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    forms = [("float32", None), ("bfloat16", None)]
    forms += [(dtype, kind) for kind in options.kinds.split(",") for dtype in ("float32", "bfloat16")]
    steps = {}
    for dtype, kind in forms:
        model = load_model(options.model, dtype=dtype, load_format="dummy", quantization=kind, progress=False)
        steps[f"{kind} weights, {dtype}" if kind else dtype] = stepper(model, options.rows, 0, None)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.turns + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn > 1:
                times[name].append(time.perf_counter() - begin)
    emit(**environment(options.model))
    for name, seconds in times.items():
        ratios = {
            f"times_{other}": [
                round(median(times[other]) / median(seconds), 2),
                round(min(times[other]) / min(seconds), 2),
            ]
            for other in ("float32", "bfloat16")
        }
        emit(metric=name, ms=round(1e3 * median(seconds), 2), spread=spread(seconds), rows=options.rows, **ratios)


if __name__ == "__main__":
    main()
