"""Chunked selective state-space scan (Mamba2's SSD) over ragged prefill tiles, and over whole sequences."""

from kernels_pallas.ssd_scan.api import ssd_scan, ssd_scan_sequence

__all__ = ["ssd_scan", "ssd_scan_sequence"]
