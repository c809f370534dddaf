"""Mamba2's gated, grouped RMS normalisation."""

from kernels_pallas.gated_norm.api import gated_rms_norm

__all__ = ["gated_rms_norm"]
