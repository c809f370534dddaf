"""Mamba2's convolution of x, scan, gate and norm of ragged prefill tiles, as one operation."""

from kernels_pallas.gated_scan.api import gated_scan

__all__ = ["gated_scan"]
