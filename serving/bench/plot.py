"""Plots the output of benchmarks. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mamba_jax.version import install_advice

_CREATOR = b"mamba-jax bench"
"""Written into each picture, to recognize it."""


def bars(values: Mapping[str, Sequence[float]], path: str | Path, *, title: str, log: bool = False) -> None:
    """One bar for each name: the median, with every run as a dot. `log`: a logarithmic axis."""
    figure, axes = _figure(title, height=1.2 + 0.4 * len(values))
    names = list(values)
    axes.barh(names, [float(np.median(values[name])) for name in names], color="#4878a8", log=log)
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
    if path is not None and Path(path).exists() and _CREATOR not in Path(path).read_bytes():
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
