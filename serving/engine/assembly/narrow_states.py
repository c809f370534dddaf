"""Determines from the flags the dtypes of states off the device and of rounded running rows."""

from __future__ import annotations

from mamba_jax.rounding import NarrowDtype
from serving.config import EngineConfig


def waiting_form(config: EngineConfig) -> NarrowDtype | None:
    """Returns the form of states that leave the device; None if it is the form of the slots."""
    return NarrowDtype(config.checkpoint_dtype) if config.narrows_states else None


def handoff_form(config: EngineConfig) -> NarrowDtype | None:
    """Returns the form of states handed from one running row to another. If running rows are rounded, states must not
    be, so the result is None."""
    return None if config.rounds_rows else waiting_form(config)


def row_rounding(config: EngineConfig) -> tuple[NarrowDtype, int] | None:
    """Returns the form to which running rows are rounded, and the number of tokens between roundings."""
    return (NarrowDtype(config.checkpoint_dtype), config.state_block_size) if config.rounds_rows else None
