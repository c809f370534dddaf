"""The figures of a check: printed when they are measured, for people, and kept in one JSON file."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any


class Report:
    """Figures in the order in which they are measured. `path` is written after each, so that a kill loses none."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.figures: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # a deadline reports from a thread of its own

    def add(self, metric: str, **fields: Any) -> None:
        """Prints one line, and keeps it."""
        with self._lock:
            self.figures.append({"metric": metric, **fields})
            print(f"{metric}: " + ", ".join(_told(name, value) for name, value in fields.items()), flush=True)
            if self.path is not None:
                written = self.path.with_name(f"{self.path.name}.new")
                written.write_text("[\n" + ",\n".join(map(json.dumps, self.figures)) + "\n]\n")
                written.replace(self.path)

    def of(self, metric: str) -> list[dict[str, Any]]:
        """All figures of one metric."""
        return [figure for figure in self.figures if figure["metric"] == metric]


def _told(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name} {value}"
    return f"{value:.4g} {name}" if isinstance(value, float) else f"{value} {name}"
