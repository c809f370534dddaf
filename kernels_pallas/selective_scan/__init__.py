"""The selective scan of Mamba (the first version): over prefill tiles, over whole sequences, and step by step."""

from kernels_pallas.selective_scan.api import selective_scan, selective_scan_sequence, selective_update

__all__ = ["selective_scan", "selective_scan_sequence", "selective_update"]
