"""The tiny models behind the golden fixtures, as Hugging Face configs. Odd shapes and real features on purpose.

The directory of each fixture has a `recipe.json`. Its `changes` are config fields that must matter: the maker of the
fixtures checks that the log-probabilities move when such a field is given the value written there, so that a port that
ignores the field cannot pass.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """One fixture: which model class, its config, and how the files on disk differ from what Hugging Face writes."""

    architecture: str
    config: dict[str, Any]
    note: str = ""
    """What is particular."""
    steps: Literal["default", "full", "slow"] = "slow"
    """The first tier of tests that compiles the model's steps, which takes time: in the full tier one of most families,
    whose layers the others have, by default experts, shared blocks and each kind of recurrence."""
    divided: dict[str, Any] | None = None
    """A model like the fixture's, which is odd, that two devices can share: `changes` of config.json, the source of
    `drafts`, and whether only `--slow` runs it."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Config fields that must matter -> another value."""
    seed: int = 0
    quieter: dict[str, float] = field(default_factory=dict)
    """Factors on weights whose names contain these: where the architecture itself amplifies differences, usual weights
    would amplify the rounding errors of float32 beyond what the tests allow."""
    rename_config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json to write as well, or (None) to leave out: old spellings that Hugging Face still reads."""
    rename_weights: tuple[str, str] | None = None
    """Prefix of every stored name -> the other spelling."""
    mlp_sizes: tuple[int, ...] | None = None
    """NemotronH with an `intermediate_size` of its own for each MLP layer."""
    mtp: bool = False
    """Also store the weights of an MTP layer, which Hugging Face does not read, as the family's makers do."""
    modules: bool = False
    """Write tensors as transformers' modules hold them, where what it saves is not what their makers publish."""
    seeing: bool = False
    """Write it as the text part of a model that also has a vision tower."""
    literal_infinity: bool = False
    """Write infinite numbers as older versions did: a bare Infinity."""

    @property
    def chunk_size(self) -> int:
        """Of the config, whatever the family calls it; without one, the gated delta rule's in transformers."""
        return self.config.get("mamba_chunk_size") or self.config.get("chunk_size", 64)


RECIPES = {
    path.parent.name: Recipe(**json.loads(path.read_text()))
    for path in sorted(Path(__file__).parent.glob("*/recipe.json"))
}
