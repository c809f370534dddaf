"""The script for a first run on a GPU, rehearsed: small sizes, kernels interpreted."""

import json

import pytest

from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.generation import GOLDEN_PROMPTS, GOLDEN_TOKENS
from serving.engine.assembly.gpu_memory import VARIABLE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.9")  # which the script would set for the whole process


@pytest.mark.parametrize(
    "job",
    [
        "update",
        "scan",
        "delta-update",
        "delta-scan",
        "gated-update",
        "gated-delta",
        "gated-replay",
        "delta-replay",
        "attention",
        "experts",
        "expert-mlp",
    ],
)
def test_kernels_are_checked(job, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check", "kernels", "--tiny", "--no-sweep", "--only", job])
    assert main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = [line["ok"] for line in lines if "ok" in line]
    assert verdicts
    assert all(verdicts)


@pytest.mark.parametrize("job", ["dispatch", "decode", "prefill", "generate", "mixed", "drafts"])
def test_programs_are_timed(job, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_check", "programs", "--tiny", "--only", job])
    assert main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [line for line in lines if "error" in line]
    assert len(lines) > 2 + (job != "dispatch")  # in addition to the machine, the copy and the load


def test_greedy_tokens_are_compared_with_golden_ones(monkeypatch, capsys, tmp_path):
    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["gpu_check", *arguments])
        failed = main()
        return failed, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    _, (golden,) = run("golden")
    assert [len(tokens) for tokens in golden] == [GOLDEN_TOKENS] * len(GOLDEN_PROMPTS)
    path, compare = tmp_path / "golden.json", ("programs", "--tiny", "--only", "greedy", "--golden")
    path.write_text(json.dumps(golden))
    failed, lines = run(*compare, str(path))
    assert failed == 0
    assert [line["equal"] for line in lines if "equal" in line] == [len(golden)]
    golden[1][-1] += 1  # one prompt's last token
    path.write_text(json.dumps(golden))
    failed, lines = run(*compare, str(path))
    assert failed == 1
    assert [line["equal"] for line in lines if "equal" in line] == [len(golden) - 1]
