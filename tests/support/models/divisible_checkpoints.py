"""Tiny checkpoints of every family whose heads divide by two, or by eight: the golden ones are odd on purpose."""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoints.random import write_random
from tests.golden.recipes import RECIPES

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@dataclass(frozen=True)
class Case:
    """A golden config with other sizes, and how drafts are made for it."""

    golden: str
    changes: dict
    drafts: str = "ngram"


def _cases(*, slow: bool) -> dict[str, Case]:
    divided = {name: recipe.divided for name, recipe in RECIPES.items() if recipe.divided is not None}
    return {name: Case(name, one["changes"], one["drafts"]) for name, one in divided.items() if one["slow"] == slow}


FAMILIES, MORE = _cases(slow=False), _cases(slow=True)
# Heads for eight devices; two groups and two key-value heads, each on four of them.
EIGHT = Case("nemotronh", {
    "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 16, "n_groups": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 256,
})  # fmt: skip


def write_checkpoint(directory: Path, case: Case) -> Path:
    """The checkpoint of a case."""
    config = json.loads((GOLDEN / case.golden / "config.json").read_text())
    return write_random(directory, config | case.changes, seed=5)
