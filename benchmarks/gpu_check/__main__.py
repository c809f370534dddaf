"""Check each GPU kernel against XLA and compare their times; then measure whole programs and the engine. Prints JSON
lines.

    python -m benchmarks.gpu_check kernels              # updates and scans, attention, experts
    python -m benchmarks.gpu_check programs             # decode and prefill of whole models, dispatch, LLM.generate
    python -m benchmarks.gpu_check kernels --only scan
    python -m benchmarks.gpu_check programs --tiny      # does the script itself work? on any machine
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_check golden > golden.json   # greedy tokens, for `programs --golden`

Each of the first two takes some minutes on one GPU. Bandwidths are compared with that of a copy on the same machine
(read + write). Lines on block sizes report the fastest ones, which should be a kernel's defaults. The scan of
`mamba-ssm` is also timed if it is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu_check.attention import check_attention
from benchmarks.gpu_check.experts import check_experts
from benchmarks.gpu_check.generation import check_generation, greedy_tokens
from benchmarks.gpu_check.programs import time_decode, time_dispatch, time_prefill
from benchmarks.gpu_check.recurrences import DELTA, MAMBA2, check_scan, check_update
from benchmarks.gpu_check.sizes import TINY, Sizes
from benchmarks.gpu_timing import copy_bandwidth
from serving.bench.report import emit, environment


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kernels", "programs", "golden"])
    parser.add_argument("--only", metavar="JOB", help="one of the part's jobs")
    parser.add_argument("--tiny", action="store_true", help="small sizes, kernels interpreted")
    parser.add_argument("--no-sweep", action="store_true", help="the kernels' own block sizes only")
    parser.add_argument("--golden", type=Path, help="what `golden` printed on another machine")
    options = parser.parse_args()
    if options.part == "golden":
        print(json.dumps(greedy_tokens()))
        return 0
    sizes, sweep = TINY if options.tiny else Sizes(), not options.no_sweep
    golden = json.loads(options.golden.read_text()) if options.golden else None
    emit(**environment(sizes.models[0]))
    copy = copy_bandwidth(sizes.copied, calls=sizes.calls)
    emit(metric="copy", gb_per_s=round(copy / 1e9, 1))
    jobs: dict[str, dict[str, Callable[[], bool]]] = {
        "kernels": {
            "update": lambda: check_update(MAMBA2, sizes, copy, sweep=sweep),
            "scan": lambda: check_scan(MAMBA2, sizes, sweep=sweep),
            "delta-update": lambda: check_update(DELTA, sizes.of_delta(), copy, sweep=sweep),
            "delta-scan": lambda: check_scan(DELTA, sizes.of_delta(), sweep=sweep),
            "attention": lambda: check_attention(sizes, copy, sweep=sweep),
            "experts": lambda: check_experts(sizes, copy),
        },
        "programs": {
            "dispatch": lambda: time_dispatch(sizes),
            "decode": lambda: time_decode(sizes, copy),
            "prefill": lambda: time_prefill(sizes),
            "generate": lambda: check_generation(sizes, golden),
        },
    }
    chosen = jobs[options.part]
    if options.only not in (None, *chosen):
        parser.error(f"--only {options.only}: {options.part} has {', '.join(chosen)}")
    failed = 0
    for name, job in chosen.items():
        if options.only in (None, name):
            try:
                failed += not job()
            except Exception as error:  # the other measurements are still wanted
                failed += 1
                emit(metric=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
