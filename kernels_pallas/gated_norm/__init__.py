"""Mamba2's gate, and its gated, grouped RMS normalization."""

from kernels_pallas.gated_norm.api import gated, gated_rms_norm

__all__ = ["gated", "gated_rms_norm"]
