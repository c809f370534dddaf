"""The Mamba2 recurrence in decode, from a state that was stored some tokens ago and the inputs that came since."""

from kernels_pallas.state_replay.api import Tail, state_replay

__all__ = ["Tail", "state_replay"]
