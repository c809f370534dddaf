"""The files that a family and a recurrence touch, as docs/extending.md lists them: no others name them."""

import inspect
import re
from pathlib import Path

import pytest

from mamba_jax.config import RecurrenceConfig
from mamba_jax.modules import blocks

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels_pallas", "mamba_jax", "checkpoints", "serving")
READ = (".py", ".cc", ".h", ".json", ".jsonl")
RECURRENCES = [one for one in blocks.MIXERS if issubclass(one, RecurrenceConfig) and one.__module__.startswith("mamba")]
DOCUMENT = (ROOT / "docs/extending.md").read_text()


def naming(pattern, *folders):
    """The files of these folders, this one aside, that have the pattern."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in READ]
    found = [path for path in files if path != Path(__file__) and re.search(pattern, path.read_text())]
    return {str(path.relative_to(ROOT)) for path in found}


def test_a_family_touches_its_file_the_list_and_its_data():
    own = {"mamba_jax/families/recurrent_gemma.py", "mamba_jax/families/__init__.py"}
    data = {"checkpoints/presets.jsonl", "tests/checkpoints/published_configs.jsonl", "tests/golden/eos.json"}
    golden = "tests/golden/recurrent-gemma"
    assert naming(r"recurrent_gemma\b", *PACKAGES, "tests") == own | data | {f"{golden}/config.json"}
    assert len([path for path in (ROOT / golden).iterdir() if path.is_file()]) == 4
    assert all(path.removeprefix("mamba_jax/") in DOCUMENT for path in (*own, *data, golden))


@pytest.mark.parametrize("config", RECURRENCES, ids=lambda one: one.__name__)
def test_a_recurrence_touches_its_declaration_its_mixer_and_the_table(config):
    """Apart from the families that have it."""
    own = {inspect.getfile(one) for one in (config, blocks.MIXERS[config], blocks)}
    own = {str(Path(file).relative_to(ROOT)) for file in own}
    named = naming(rf"\b{config.__name__}\b", *PACKAGES)
    assert {path for path in named if not path.startswith("mamba_jax/families/")} == own
    assert all(path.removeprefix("mamba_jax/") in DOCUMENT for path in own)
