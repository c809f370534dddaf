"""The operations between the projections of a layer with a linear recurrence."""

from kernels_pallas.gated_recurrence.api import Projections, Weights, Windows, gated_replay, gated_scan, gated_update
from kernels_pallas.gated_recurrence.gates import DeltaGates, Gates, Mamba2Gates

__all__ = [
    "DeltaGates", "Gates", "Mamba2Gates", "Projections", "Weights", "Windows", "gated_replay", "gated_scan",
    "gated_update",
]  # fmt: skip
