"""The operations between the projections of a Mamba2 layer, for decode of rows that are held by anchors."""

from kernels_pallas.gated_replay.api import gated_replay

__all__ = ["gated_replay"]
