"""The operations between the projections of a Mamba2 layer, for decode."""

from kernels_pallas.gated_update.api import gated_update, step_sizes

__all__ = ["gated_update", "step_sizes"]
