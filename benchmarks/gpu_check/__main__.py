"""Check each GPU kernel against XLA and compare their times; measure whole programs and the engine. Prints JSON lines.

    python -m benchmarks.gpu_check programs             # decode, prefill and mixed steps of whole models, the engine
    python -m benchmarks.gpu_check kernels              # updates and scans, attention, experts; then block sizes
    python -m benchmarks.gpu_check kernels --only scan
    python -m benchmarks.gpu_check programs --tiny      # does the script itself work? on any machine
    JAX_PLATFORMS=cpu python -m benchmarks.gpu_check golden > golden.json   # greedy tokens, for `programs --golden`

Each of the first two ends within `--seconds` (540 by default). Every job gets a share of this time; it prints each
figure when it is measured, and lists the cases that it leaves out. Each model is loaded once, with random weights that
the GPU makes. Bandwidths are compared with that of a copy on the same machine (read + write). Lines on block sizes
report the fastest ones, which should be a kernel's defaults. The scan of `mamba-ssm` is also timed if it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.generation import greedy_tokens
from benchmarks.gpu_check.jobs import Run, kernel_jobs, program_jobs, run_jobs
from benchmarks.gpu_check.sizes import TINY, Sizes
from benchmarks.gpu_check.timing import copy_bandwidth
from serving.bench.report import emit, environment
from serving.engine.assembly.gpu_memory import reserve_gpu_memory

GRACE = 30.0
"""Seconds after which a run that is over time is ended, in the middle of a measurement if necessary."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kernels", "programs", "golden"])
    parser.add_argument("--only", metavar="JOB", help="one of the part's jobs")
    parser.add_argument("--model", help="of `programs`: a published size instead of the default ones")
    parser.add_argument("--seconds", type=float, default=540.0, help="time of the run, without the start of Python")
    parser.add_argument("--tiny", action="store_true", help="small sizes, kernels interpreted")
    parser.add_argument("--no-sweep", action="store_true", help="the kernels' own block sizes only")
    parser.add_argument("--golden", type=Path, help="what `golden` printed on another machine")
    options = parser.parse_args()
    reserve_gpu_memory(0.9)
    if options.part == "golden":
        print(json.dumps(greedy_tokens()))
        return 0
    sizes = TINY if options.tiny else Sizes()
    if options.model:
        sizes = dataclasses.replace(sizes, models=(options.model,))
    golden = json.loads(options.golden.read_text()) if options.golden else None
    jobs = kernel_jobs() if options.part == "kernels" else program_jobs(sizes, golden)
    if options.no_sweep:
        jobs = [job for job in jobs if not job.name.startswith("sweep")]
    names = list(dict.fromkeys(job.name for job in jobs))
    if options.only not in (None, *names):
        parser.error(f"--only {options.only}: {options.part} has {', '.join(names)}")
    jobs = [job for job in jobs if options.only in (None, job.name)]
    deadline = Deadline(options.seconds, {job.label: job.share for job in jobs})
    with deadline.enforced(GRACE):
        emit(**environment(sizes.models[0]))
        copy = copy_bandwidth(sizes.copied, calls=sizes.calls)
        emit(metric="copy", gb_per_s=round(copy / 1e9, 1))
        return run_jobs(jobs, Run(sizes, copy, deadline))


if __name__ == "__main__":
    raise SystemExit(main())
