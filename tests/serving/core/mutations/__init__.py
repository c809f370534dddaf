"""Planted faults for the host policy, by what they break."""

from tests.serving.core.mutations import accounts, hits, lockstep, progress, publication, replay, results, rows, sharing
from tests.serving.core.mutations.registry import CORE, Mutation

__all__ = [
    "CORE",
    "Mutation",
    "accounts",
    "hits",
    "lockstep",
    "progress",
    "publication",
    "replay",
    "results",
    "rows",
    "sharing",
]
