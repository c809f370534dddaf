"""The description of one published model size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_IDS = {"bos_token_id": None, "eos_token_id": None}
"""Of special tokens, where they could not be established."""


@dataclass(frozen=True)
class Preset:
    """A published size."""

    fields: Mapping[str, Any]
    """Of its config.json."""
    parameters: float
    """As published, without a multi-token-prediction layer."""
