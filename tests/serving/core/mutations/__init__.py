"""Planted faults for the host policy, by what they break."""

from tests.serving.core.mutations import ownership, replay, reuse, steps
from tests.serving.core.mutations.registry import CORE, Mutation

__all__ = ["CORE", "Mutation", "ownership", "replay", "reuse", "steps"]
