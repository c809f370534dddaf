"""The script that trains the demo model: its commands exist, take these options, and are not done twice."""

import os
import subprocess
from pathlib import Path

import pytest

from serving.cli.main import command

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[3] / "benchmarks/demo.sh"
# Writes down what it is asked for, and makes what the next command looks for.
STUB = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
[[ $1 == -m ]] && mkdir -p "$3" && touch "$3/manifest.json"
while [[ $# -gt 0 ]]; do [[ $1 == --output ]] && mkdir -p "$2"; shift; done
exit 0
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    for name in ("mamba-jax", "python3"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def run():
        (tmp_path / "calls").write_text("")
        subprocess.run(["bash", str(SCRIPT), str(tmp_path / "out")], check=True)
        return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]

    return run


def test_every_command_takes_its_options(calls):
    corpus, *commands = calls()
    assert corpus[:2] == ["-m", "benchmarks.demo_corpus"]
    assert [line[0] for line in commands] == ["train", "train-mtp", "train-mtp"]
    for name, *options in commands:
        given = command(name).make_context(name, options).params
        assert Path(given["output"]).is_dir()
    assert [line[0] for line in calls()] == ["train"], "a run that is whole ends at once; the rest is there"
