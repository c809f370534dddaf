"""Published models by name: their config.json as far as it shapes the model, and how many parameters they have.

A preset is a configuration without weights: for planning memory, for compiling, and for dummy weights. Each line of
`presets.jsonl` is one: the name, the published number of parameters, where both come from, and the fields of
config.json. Fields that could not be established (mostly the ids of special tokens) are null. A size is listed only if
its configuration gives the published number of parameters within 1 %, which a test checks.

Left out, because that could not be shown: Nemotron-H-4B, Zamba2-2.7B and Mamba2-1.3b (the shapes that are known give
4.49, 2.66 and 1.34 billion parameters, and only the rounded name is published), Falcon-H1-1.5B and -3B (their
multipliers are not known to all digits), LFM3-1.7B (the known shape has 1.73 billion parameters, and only the rounded
name is published).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A published size."""

    fields: Mapping[str, Any]
    """Of its config.json."""
    parameters: int
    """As published, without a multi-token-prediction layer."""


_ROWS = map(json.loads, Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
PRESETS: Mapping[str, Preset] = {row["name"]: Preset(row["config"], row["parameters"]) for row in _ROWS}
"""Published sizes: each configuration gives the published number of parameters."""
