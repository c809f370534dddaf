"""Writing tensors to safetensors files of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from checkpoints.tensor_set import INDEX_FILE, SINGLE_FILE

FILE_BYTES = 2 << 30
"""Of tensors in one file, which are on the host together; a larger tensor has a file of its own."""


class TensorFiles:
    """Writes numbered files and their index; tensors that fit into one file are `model.safetensors`, without an index.

    Call `close` at the end.

    Args:
        directory: exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, np.ndarray] = {}
        self._weight_map: dict[str, str] = {}
        self._number = self._total = 0

    def add(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor, at the latest when the next file is full."""
        if self._held and sum(each.nbytes for each in self._held.values()) + value.nbytes > FILE_BYTES:
            self._write(f"model-{self._number + 1:05d}.safetensors")
        self._held[name] = np.ascontiguousarray(value)
        self._total += value.nbytes

    def close(self) -> None:
        """Writes the remaining tensors, and the index."""
        if not self._number:
            self._write(SINGLE_FILE)
            return
        self._write(f"model-{self._number + 1:05d}.safetensors")
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")

    def _write(self, file: str) -> None:
        self._number += 1
        save_file(self._held, self._directory / file, {"format": "pt"})
        (self._directory / file).chmod(0o644)
        self._weight_map |= dict.fromkeys(self._held, file)
        self._held = {}
