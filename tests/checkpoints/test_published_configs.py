"""The config.json of published models, as far as it shapes the text model: read and built without weights, or refused.

`published_configs.jsonl` has one model a line: its name and the fields that its makers' tools and other engines quote.
`billions` is the published number of the text model's parameters, for models that are not presets.
Models of missing families may have only the fields that name the family.
"""

import json
from pathlib import Path

import pytest

from checkpoints import load_config
from checkpoints.errors import CheckpointError
from mamba_jax.families import FAMILIES, UNSUPPORTED
from mamba_jax.model import HybridModel

ROWS = [json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()]
MISSING = {
    "nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B": "Nemotron Puzzle models need blocks of different sizes",
    "inclusionAI/Ring-mini-linear-2.0": "Ling and Ring 2.0 models need norms and rotary positions in lightning",
    "moonshotai/Kimi-K3": "Kimi K3 models need",
    "Qwen/Qwen3.8-Flash-Next": "Qwen3.8-Flash-Next models need",
    "thinkingmachines/Inkling": "Inkling models need",
    "microsoft/Phi-4-mini-flash-reasoning": "Phi-4-mini-flash models need",
}
"""Models that are refused, and the reason in the error."""


def directory(tmp_path, row):
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    return tmp_path


def test_the_table_has_models_of_every_family():
    names = [row["model"] for row in ROWS]
    assert len(set(names)) == len(names) >= 34
    assert set(MISSING) <= set(names)
    assert len(names) - len(MISSING) >= 24


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_a_published_config_is_read_or_refused_by_name(tmp_path, row):
    if (reason := MISSING.get(row["model"])) is not None:
        with pytest.raises(CheckpointError, match=f"is not supported: {reason}") as error:
            load_config(directory(tmp_path, row))
        assert "\n" not in str(error.value)
        return
    config = load_config(directory(tmp_path, row))
    text = row["config"].get("text_config") or row["config"].get("llm_config") or row["config"]
    assert config.hidden_size == text["hidden_size"]
    assert config.vocab_size == text["vocab_size"]
    parameters = HybridModel.abstract(config).num_parameters
    assert parameters > config.hidden_size * config.vocab_size
    if "billions" in row:
        assert parameters == pytest.approx(row["billions"] * 1e9, rel=0.01)


def test_unsupported_models_are_not_those_of_a_family():
    assert not set(UNSUPPORTED) & {one for family in FAMILIES for one in family.model_types}
