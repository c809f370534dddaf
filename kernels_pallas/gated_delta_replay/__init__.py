"""The operations between the projections of a gated delta net, for decode of rows that are held by anchors."""

from kernels_pallas.gated_delta_replay.api import gated_delta_replay

__all__ = ["gated_delta_replay"]
