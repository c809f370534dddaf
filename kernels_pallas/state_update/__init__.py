"""The recurrent form of the Mamba2 scan, for decode: a few steps per row, states in slots."""

from kernels_pallas.state_update.api import state_update

__all__ = ["state_update"]
