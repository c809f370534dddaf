"""The commands of published vLLM recipes for recurrent models, through the command line up to loading the model."""

import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import pytest

from checkpoints.resolve import DEMO_DIRECTORY
from serving.cli.main import run

TABLE = Path(__file__).parent / "vllm_recipes.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
GUIDES = [(recipe, line) for recipe, kind, line in ROWS if kind == "guide"]
LISTS = [(recipe, line) for recipe, kind, line in ROWS if kind == "list"]

REFUSED = {
    r"--(tool-call|reasoning)-parser (inkling|kimi_k3): .* models are not supported": "families",
    r"quantization: must be .* got 'ascend'": "weights for another vendor's devices",
}
"""Errors that a recipe's command may end with, and what is missing."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The demo model in place of a recipe's, long enough for all of them."""
    directory = tmp_path_factory.mktemp("checkpoints") / "model"
    shutil.copytree(DEMO_DIRECTORY, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    return str(directory)


@pytest.fixture
def outcome(checkpoint, monkeypatch, capfd):
    """Runs a recipe's command: "" if it reaches loading, else the error."""

    class Socket:
        def close(self):
            pass

    begun = []
    # Drafters are not downloaded.
    monkeypatch.setattr("serving.engine.assembly.fetch.local", lambda ref, **_: ref)
    monkeypatch.setattr("serving.cli.serve.bind", lambda host, port: Socket())
    monkeypatch.setattr("serving.cli.serve._run", lambda *_, **__: begun.append(True))
    monkeypatch.setattr("serving.cli.serve._serve_together", lambda *_, **__: begun.append(True))

    def run_one(line):
        words = shlex.split(line)
        at = words.index("--model") + 1 if "--model" in words else 0
        begun.clear()
        code = run(["serve", *words[:at], checkpoint, *words[at + 1 :]])
        error = capfd.readouterr().err
        assert "Traceback" not in error
        assert (code, bool(begun)) in ((0, True), (2, False)), error
        return "" if code == 0 else next(text for text in error.splitlines() if text.startswith("mamba-jax: error:"))

    return run_one


def outcomes(outcome, rows):
    errors = Counter(outcome(line) for _, line in rows)
    passed = errors.pop("", 0)
    unexpected = [error for error in errors if not any(re.search(pattern, error) for pattern in REFUSED)]
    assert not unexpected
    return passed


def test_the_table_is_that_of_recurrent_models():
    assert len(GUIDES) == 118
    assert len({recipe for recipe, _, _ in ROWS}) == 41


def test_commands_of_the_guides_reach_loading(outcome):
    assert outcomes(outcome, GUIDES) >= 113


def test_lists_of_flags_reach_loading(outcome):
    assert outcomes(outcome, LISTS) >= 172
