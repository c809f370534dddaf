"""The recurrent form of the gated delta rule, for decode: a few steps per row, states in slots."""

from kernels_pallas.delta_update.api import delta_update

__all__ = ["delta_update"]
