"""The selective scan of Mamba (the first version): over prefill tiles, whole sequences, and steps, and in replay."""

from kernels_pallas.selective_scan.api import (
    SelectiveTail,
    selective_replay,
    selective_scan,
    selective_scan_sequence,
    selective_update,
)

__all__ = ["SelectiveTail", "selective_replay", "selective_scan", "selective_scan_sequence", "selective_update"]
