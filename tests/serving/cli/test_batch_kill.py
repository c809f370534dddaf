"""`generate --input` killed by SIGKILL, as by a machine that goes down, and run again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "nemotronh"
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--no-compilation-cache"]


def answers(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_killed_batch_is_completed_without_duplicates(tmp_path):
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    lines = [
        {"id": i, "prompt_token_ids": [3 + i % 7, 5, 9], "max_tokens": 60, "temperature": 1.0, "seed": i,
         "ignore_eos": True}
        for i in range(60)
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(output: Path) -> list[str]:
        names = ["--model", str(GOLDEN), "--input", str(source), "--output", str(output)]
        return [sys.executable, "-m", "serving.cli", "generate", *names, *FLAGS]

    killed = 0
    for wanted in (3, 25):
        process = subprocess.Popen(command(target), cwd=ROOT, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 300
        while process.poll() is None and answers(target) < wanted and time.monotonic() < end:
            time.sleep(0.002)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        assert wanted <= answers(target) < len(lines)
    assert killed == 2
    done = subprocess.run(command(target), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "already in the output" in done.stderr
    subprocess.run(command(whole), cwd=ROOT, check=True, capture_output=True)

    def read(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    assert [line["id"] for line in read(target)] == list(range(len(lines)))
    assert [line["token_ids"] for line in read(target)] == [line["token_ids"] for line in read(whole)]
