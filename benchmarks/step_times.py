"""Times of steps by model and machine: bytes, operations, kernels, waits. Nothing is measured.

    python -m benchmarks.step_times                     # the table of docs/hardware.md, by analysis
    python -m benchmarks.step_times nemotron-h-8b:h200-1

Each case has the default flags of `mamba-jax plan`. Times are those of `plan --analysis`: bytes and operations at
published speeds, kernels and waits by the assumptions of `overheads.py` and `targets.py` in `serving`. A mixed step is
compared with a decode and a prefill step one after the other (`--no-mixed-steps`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from serving.capacity.plan import make_plan
from serving.capacity.result import CapacityPlan, Step
from serving.capacity.targets import target
from serving.config import EngineConfig

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("nemotron-h-8b", "h200-1", {}),
    ("nemotron-h-8b", "h200-2", {}),
    ("nemotron-3-nano-30b-a3b", "h200-1", {}),
    ("qwen3-next-80b-a3b", "h200-1", {"quantization": "fp8"}),
    ("kimi-linear-48b-a3b", "h200-1", {}),
    ("nemotron-h-8b", "v6e-8", {}),
    ("granite-4.0-h-small", "v6e-8", {}),
    ("qwen3-next-80b-a3b", "v6e-8", {}),
)
CONTEXTS = (2_048, 32_768)


def planned(model: str, machine: str, context: int, **flags: Any) -> CapacityPlan:
    """The plan by analysis; the context is cut to the model's length."""
    of = target(machine)
    config = EngineConfig.create(model=model, tensor_parallel_size=of.count, **flags)
    return make_plan(config, of, compile=False, context=context)


def step_rows(model: str, machine: str, flags: dict[str, Any]) -> Iterator[list[str]]:
    """A row for the decode step at each context, then one for a mixed step."""
    plans = list(
        {plan.context: plan for plan in (planned(model, machine, each, **flags) for each in CONTEXTS)}.values()
    )
    name = model + (f", {flags['quantization']} weights" if "quantization" in flags else "")
    for plan in plans:
        decode = plan.steps[-1]
        yield [machine, name, decode.name, f"{plan.context:,}", *_times(decode), ""]
    steps = plans[0].steps
    mixed = next((step for step in steps if step.name.startswith("mixed")), None)
    if mixed is not None:
        before = sum(step.expected_ms for step in steps if step is not mixed)
        yield [machine, name, mixed.name, f"{plans[0].context:,}", *_times(mixed), f"{before:.2f}"]


def _times(step: Step) -> list[str]:
    times = (step.memory_ms, step.compute_ms, step.launch_ms, step.link_ms + step.latency_ms)
    return [f"{time:.2f}" if time else "-" for time in times] + [f"{step.expected_ms:.2f}"]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="MODEL:MACHINE", help="instead of the default ones")
    options = parser.parse_args()
    cases: Any = [
        (model, machine, {}) for model, _, machine in (case.partition(":") for case in options.cases)
    ] or CASES
    heads = ["machine", "model", "step", "context", "bytes", "operations", "kernels", "exchanges", "expected"]
    print("\n".join(table([*heads, "as two steps"], [row for case in cases for row in step_rows(*case)])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
