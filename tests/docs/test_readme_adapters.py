"""The README's commands that train adapters of the demo model, serve them and query each by name."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.fleets.processes import free_port
from tests.support.markdown_blocks import blocks_of
from tests.support.waiting import comes_true, is_ready

ROOT = Path(__file__).resolve().parents[2]
FEWER_STEPS = "--steps 3 --batch-size 2 --sequence-length 64 --held-out 0"
SMALL_SERVER = "--no-warmup --max-model-len 128 --max-num-seqs 4"
NAMES = ["maths", "sentences", "tenant"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, as the README does")
def test_the_readme_trains_serves_and_queries_adapters(tmp_path):
    blocks = [block.text for block in blocks_of(ROOT / "README.md")]
    at = next(index for index, text in enumerate(blocks) if "mamba-jax train-s0" in text)
    commands, queries = blocks[at : at + 2]
    port = free_port()
    address = f"127.0.0.1:{port}"
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    lines = commands.replace("\\\n", " ").replace("mamba-jax", f"{sys.executable} -m serving.cli").splitlines()
    train = [f"{line} {FEWER_STEPS}" if "train-" in line else line for line in lines[:-1]]
    assert "--port 8000" in lines[-1]
    serve = f"exec {lines[-1]} {SMALL_SERVER}".replace("--port 8000", f"--port {port}")
    here = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    subprocess.run(["bash", "-ec", "\n".join(train)], check=True, timeout=500, **here)
    assert "The answer is 384" in (tmp_path / "sentences.jsonl").read_text()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(["bash", "-ec", serve], stderr=log, **here)
    try:
        assert comes_true(lambda: process.poll() is not None or is_ready(f"http://{address}"), 300)
        assert process.poll() is None, (tmp_path / "log").read_text()
        asked = subprocess.run(
            ["bash", "-ec", queries.replace("curl ", "curl -sS -w '\\n' ").replace("localhost:8000", address)],
            check=True, capture_output=True, timeout=300, **here,
        )  # fmt: skip
        answers = [json.loads(line) for line in asked.stdout.splitlines()]
        assert [answer["model"] for answer in answers] == NAMES
        assert all(answer["choices"][0]["text"] for answer in answers)
        with httpx.Client(base_url=f"http://{address}/v1", timeout=120) as client:
            parents = {model["id"]: model["parent"] for model in client.get("/models").json()["data"]}
            assert parents == {"demo": None, **dict.fromkeys(NAMES, "demo")}
            body = {"prompt": "Question:", "max_tokens": 1, "logprobs": 0, "temperature": 0}
            found = [client.post("/completions", json=body | {"model": name}).json() for name in ["demo", *NAMES]]
            logprobs = {one["choices"][0]["logprobs"]["token_logprobs"][0] for one in found}
            assert len(logprobs) == 4, "each name has log-probabilities of its own"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    assert "Traceback" not in (tmp_path / "log").read_text()
