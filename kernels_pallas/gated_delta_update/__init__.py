"""The operations between the projections of a gated delta net, for decode."""

from kernels_pallas.gated_delta_update.api import gated_delta_update
from kernels_pallas.gated_delta_update.gates import Gates, decays_and_strengths, unit

__all__ = ["Gates", "decays_and_strengths", "gated_delta_update", "unit"]
