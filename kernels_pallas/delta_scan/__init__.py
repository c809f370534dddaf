"""Chunked gated delta rule over ragged prefill tiles, and over whole sequences."""

from kernels_pallas.delta_scan.api import delta_scan, delta_scan_sequence

__all__ = ["delta_scan", "delta_scan_sequence"]
