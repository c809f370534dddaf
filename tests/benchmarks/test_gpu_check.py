"""The script for a first run on a GPU, rehearsed: small sizes, kernels interpreted."""

import json

import pytest

from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.generation import GOLDEN_PROMPTS, GOLDEN_TOKENS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("job", ["update", "scan", "delta-update", "delta-scan", "attention", "experts"])
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


def test_greedy_tokens_are_held_beside_golden_ones(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpu_check", *arguments])
        failed = main()
        return failed, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    _, (golden,) = run("golden")
    assert [len(tokens) for tokens in golden] == [GOLDEN_TOKENS] * len(GOLDEN_PROMPTS)
    path, compare = tmp_path / "golden.json", ("programs", "--tiny", "--only", "generate", "--golden")
    path.write_text(json.dumps(golden))
    failed, lines = run(*compare, str(path))
    assert failed == 0
    assert [line["equal"] for line in lines if "equal" in line] == [len(golden)]
    golden[1][-1] += 1  # one prompt's last token
    path.write_text(json.dumps(golden))
    failed, lines = run(*compare, str(path))
    assert failed == 1
    assert [line["equal"] for line in lines if "equal" in line] == [len(golden) - 1]
    assert any("tokens_per_s" in line for line in lines)  # which is measured all the same
