"""Determines from the flags the dtype of states in tiers, to which running rows are rounded, too."""

from __future__ import annotations

from mamba_jax.rounding import NarrowDtype
from serving.config import EngineConfig


def waiting_form(config: EngineConfig) -> NarrowDtype | None:
    """Returns the form of states in tiers; None if it is the form of the slots."""
    return NarrowDtype(config.checkpoint_dtype) if config.narrows_states else None


def row_rounding(config: EngineConfig) -> tuple[NarrowDtype, int] | None:
    """Returns the form to which running rows are rounded, and the number of tokens between roundings."""
    return (NarrowDtype(config.checkpoint_dtype), config.state_block_size) if config.narrows_states else None
