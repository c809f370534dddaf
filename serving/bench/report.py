"""The machine and settings that each measurement reports, summaries of its figures, and plots (extra `plots`)."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mamba_jax.version import install_advice


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
        "cpu": _of_cpu("model name") or platform.processor() or platform.machine(),
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


def cpu_instructions() -> str:
    """Those instruction sets of the CPU that decide how fast products are; empty if the system does not list them."""
    telling = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
    flags = _of_cpu("flags", "Features").split()
    return " ".join(name for name in telling if name in flags)


def _of_cpu(*names: str) -> str:
    """What Linux says of the first CPU under one of these names."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def emit(**fields: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps(fields), flush=True)


def spread(values: Sequence[float]) -> float:
    """Largest over smallest: how noisy the machine was."""
    return round(max(values) / min(values), 3) if min(values) > 0 else float("inf")


_CREATOR = b"mamba-jax bench"
"""Written into each picture, to recognize it."""


def bars(values: Mapping[str, Sequence[float]], path: str | Path, *, title: str) -> None:
    """One bar for each name: the median, with every run as a dot."""
    figure, axes = _figure(title, height=1.2 + 0.4 * len(values))
    names = list(values)
    axes.barh(names, [float(np.median(values[name])) for name in names], color="#4878a8")
    for row, name in enumerate(names):
        axes.plot(values[name], [row] * len(values[name]), "k.", markersize=4)
    axes.invert_yaxis()
    _save(figure, path)


def cumulative(values: Mapping[str, Sequence[float]], path: str | Path, *, title: str) -> None:
    """The share of all values (milliseconds) up to each: percentiles can be read off."""
    figure, axes = _figure(title, height=4.0)
    for name, each in values.items():
        axes.step(np.sort(each), np.arange(1, len(each) + 1) / len(each), where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def check_plot(path: str | None) -> None:
    """Refuses to replace a file that no benchmark has drawn. Ends the program with a message."""
    if path is not None and (at := Path(path)).exists() and not (at.is_file() and _CREATOR in at.read_bytes()):
        raise SystemExit(f"--plot {path}: exists and is not a picture of a benchmark; give another file")


def _save(figure: Any, path: str | Path) -> None:
    field = "Software" if Path(path).suffix == ".png" else "Creator"
    figure.savefig(path, bbox_inches="tight", dpi=120, metadata={field: _CREATOR.decode()})


def _figure(title: str, *, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure  # no pyplot: it keeps figures, and asks for a screen
    except ImportError:
        raise SystemExit(f"plots need matplotlib: {install_advice('plots')}, or leave --plot out") from None
    figure = Figure(figsize=(8, height))
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes
