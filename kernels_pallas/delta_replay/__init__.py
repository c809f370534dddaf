"""The gated delta rule in decode, from a state that was stored some tokens ago and what was added to it since."""

from kernels_pallas.delta_replay.api import DeltaTail, delta_replay

__all__ = ["DeltaTail", "delta_replay"]
