"""The selective scan of Mamba (the first version): over prefill tiles, whole sequences, and steps, and in replay."""

from kernels_pallas.selective_scan.api import (
    selective_replay,
    selective_scan,
    selective_scan_sequence,
    selective_update,
)
from kernels_pallas.selective_scan.entry import SelectiveEntry, SelectiveTail

__all__ = [
    "SelectiveEntry", "SelectiveTail", "selective_replay", "selective_scan", "selective_scan_sequence",
    "selective_update",
]  # fmt: skip
