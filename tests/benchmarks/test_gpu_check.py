"""The script for a first run on a GPU, rehearsed: small sizes, kernels interpreted."""

import json

import pytest

from benchmarks.gpu_check.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("job", ["update", "scan", "attention", "experts"])
def test_kernels_are_checked(job, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check", "kernels", "--tiny", "--no-sweep", "--only", job])
    assert main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = [line["ok"] for line in lines if "ok" in line]
    assert verdicts
    assert all(verdicts)


@pytest.mark.parametrize("job", ["dispatch", "decode", "prefill", "generate"])
def test_programs_are_timed(job, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check", "programs", "--tiny", "--only", job])
    assert main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in lines if "error" in line]
    assert len(lines) > 2  # beside the machine and the copy
