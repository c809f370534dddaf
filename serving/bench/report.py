"""The machine and settings that each measurement reports, and summaries of its figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def environment(model: str, *, devices: bool = True) -> dict[str, Any]:
    """Machine, versions, model and command: without them a figure means nothing.

    `devices` False leaves accelerators alone: a client must not take the one that its server runs on.
    """
    found = {}
    if devices:
        first = jax.devices()[0]
        found = {"device": f"{first.platform} {first.device_kind}", "devices": jax.device_count()}
    return {
        "metric": "environment",
        "cpu": cpu_name(),
        "instructions": cpu_instructions(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **found,
        "python": platform.python_version(),
        "jax": version("jax"),
        "model": Path(model).name or model,
        "command": command_line(),
        "load": round(os.getloadavg()[0], 1),
    }


def command_line() -> str:
    """The command line, without the machine's own paths."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        root = Path(__file__).resolve().parent.parent.parent
        inside = program.resolve().is_relative_to(root)
        module = ".".join(program.resolve().relative_to(root).with_suffix("").parts) if inside else program.name
        return shlex.join(["python", *(["-m"] if inside else []), module.removesuffix(".__main__"), *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def cpu_name() -> str:
    """The CPU's marketing name, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_instructions() -> str:
    """Those instruction sets of the CPU that decide how fast products are; empty if the system does not list them."""
    telling = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return " ".join(name for name in telling if name in flags)


def emit(**fields: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps(fields), flush=True)


def median(values: Sequence[float]) -> float:
    """The middle one: single runs on shared machines mean little."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Largest over smallest: how noisy the machine was."""
    return round(max(values) / min(values), 3) if min(values) > 0 else float("inf")
