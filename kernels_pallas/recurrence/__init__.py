"""The linear recurrence of Mamba2, lightning attention, gated delta nets and Kimi Delta Attention, in all its forms."""

from kernels_pallas.recurrence.api import recurrence_replay, recurrence_scan, recurrence_sequence, recurrence_update
from kernels_pallas.recurrence.entry import Entry, Tail

__all__ = ["Entry", "Tail", "recurrence_replay", "recurrence_scan", "recurrence_sequence", "recurrence_update"]
