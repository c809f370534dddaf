"""Every planted fault of the device's side shows in random traffic. The table is docs/mutations.md."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kernels_pallas.native import WHY_MISSING
from serving.core.config import SchedulerConfig
from serving.engine.assembly.design import EngineDesign
from tests.serving.core.mutations.registry import Fault
from tests.serving.differential.faults import ADAPTERS, BITS, DEVICE
from tests.serving.differential.judging import Divergence
from tests.serving.differential.traces import draw, run_trace
from tests.support.engines.shared_engines import SMALLEST, engines_of
from tests.support.engines.step_programs import PatchedPrograms

# Each table of faults, and the traces in which they show.
KINDS: tuple[tuple[dict[int, Fault], int, dict[str, Any]], ...] = (
    (DEVICE, 50_000_000, {"model": SMALLEST}),
    (ADAPTERS, 70_000_000, {"model": SMALLEST, "adapters": True}),
    (BITS, 70_000_000, {"model": f"{SMALLEST}, invariant float32"}),
)
FULL = (1, 7, 9, 58, 60)
"""Faults of each kind of program, of batches and of adapters. The nightly run plants all."""
CASES = [
    pytest.param(fault, first, how, id=str(fault), marks=pytest.mark.full if number in FULL else pytest.mark.slow)
    for table, first, how in KINDS
    for number, fault in table.items()
]
"""Those of bits need programs that LLVM has optimized."""


def shows(plant: Callable[[], object], first: int, **how: Any) -> None:
    """The fault shows in one of 16 traces. References and programs are computed before it is planted."""
    seeds = range(first, first + 16)
    for seed in seeds:
        draw(seed, **how)
    for seed in seeds[:2]:
        run_trace(seed, **how)
    plant()
    with pytest.raises(Divergence):
        [run_trace(seed, **how) for seed in seeds]


@pytest.mark.parametrize(("fault", "first", "how"), CASES)
def test_fault_shows(fault: Fault, first: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in BITS.values() and WHY_MISSING is not None:
        pytest.skip(f"native operations: {WHY_MISSING}")
    on = engines_of(f"{how['model']}, adapters" if "adapters" in how else how["model"])

    def plant() -> None:
        fault.plant(monkeypatch)
        if fault.compiles:
            own = on.compile_anew()
            # Adapters are part of the programs that they were loaded into.
            made = PatchedPrograms(on.programs, own, fault.compiles) if fault in DEVICE.values() else own
            monkeypatch.setattr(on, "_programs", dict.fromkeys(on._programs, made))

    shows(plant, first, **how)


@pytest.mark.slow
def test_chunks_that_run_over_a_boundary_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are not rounded where the references' are. The bound of rounded states is narrow enough to see it."""
    sound = EngineDesign.scheduler

    def unbound(*arguments: Any, **more: Any) -> SchedulerConfig:
        return dataclasses.replace(sound(*arguments, **more), chunks_end_at_blocks=False)

    shows(lambda: monkeypatch.setattr(EngineDesign, "scheduler", unbound), 5_100_000, model="int8, exact")
