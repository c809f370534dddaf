"""Planted faults for the host policy, by what they break."""

from tests.serving.core.mutations import ownership, reuse, steps
from tests.serving.core.mutations.registry import CORE

__all__ = ["CORE", "ownership", "reuse", "steps"]
