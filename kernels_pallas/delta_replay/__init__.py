"""The gated delta rule in decode, from a state that was stored some tokens ago and the inputs since then."""

from kernels_pallas.delta_replay.api import DeltaTail, delta_replay

__all__ = ["DeltaTail", "delta_replay"]
