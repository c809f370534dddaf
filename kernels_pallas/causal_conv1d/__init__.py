"""Mamba2's short depthwise convolution with SiLU: packed prefill, decode, replay and whole-sequence forms."""

from kernels_pallas.causal_conv1d.api import (
    causal_conv1d_prefill,
    causal_conv1d_replay,
    causal_conv1d_sequence,
    causal_conv1d_update,
)

__all__ = ["causal_conv1d_prefill", "causal_conv1d_replay", "causal_conv1d_sequence", "causal_conv1d_update"]
