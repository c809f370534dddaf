"""From flags to the forms of states that wait, and of running rows that round as they do."""

from __future__ import annotations

from mamba_jax.rounding import Narrow
from serving.config import EngineConfig


def waiting_form(config: EngineConfig) -> Narrow | None:
    """Of states that leave the device; None: as they lie in slots."""
    return Narrow(config.checkpoint_dtype) if config.narrows_states else None


def handoff_form(config: EngineConfig) -> Narrow | None:
    """Of states that go from one running row to another's. Where rows round, nothing else may be rounded."""
    return None if config.rounds_rows else waiting_form(config)


def row_rounding(config: EngineConfig) -> tuple[Narrow, int] | None:
    """How running rows are rounded, and at multiples of how many tokens."""
    return (Narrow(config.checkpoint_dtype), config.state_block_size) if config.rounds_rows else None
