"""The README's commands that train adapters of the demo model, serve them and query each by name."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.fleets.processes import Process, running
from tests.support.markdown_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
FEWER_STEPS = "--steps 3 --batch-size 2 --sequence-length 64 --held-out 0"
SMALL_SERVER = ["--no-warmup", "--max-model-len=128", "--max-num-seqs=4"]
NAMES = ["maths", "sentences", "tenant"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, as the README does")
def test_the_readme_trains_serves_and_queries_adapters(tmp_path, monkeypatch):
    blocks = [block.text for block in blocks_of(ROOT / "README.md")]
    at = next(index for index, text in enumerate(blocks) if "mamba-jax train-s0" in text)
    *prepare, serve = blocks[at].replace("\\\n", " ").splitlines()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = f"{sys.executable} -m serving.cli"
    train = [line.replace("mamba-jax", program) + f" {FEWER_STEPS}" * ("train-" in line) for line in prepare]
    subprocess.run(["bash", "-ec", "\n".join(train)], check=True, timeout=500)
    assert "The answer is 384" in (tmp_path / "sentences.jsonl").read_text()
    _, *words = shlex.split(serve)
    assert "--port 8000" in serve
    with running(Process(*words, *SMALL_SERVER, log_to=tmp_path), seconds=300) as (server,):
        query = blocks[at + 1].replace("curl ", "curl -sS -w '\\n' ").replace("localhost:8000", server.url)
        asked = subprocess.run(["bash", "-ec", query], check=True, capture_output=True, text=True, timeout=300)
        answers = [json.loads(line) for line in asked.stdout.splitlines()]
        assert [answer["model"] for answer in answers] == NAMES
        assert all(answer["choices"][0]["text"] for answer in answers)
        with httpx.Client(base_url=f"{server.url}/v1", timeout=120) as client:
            parents = {model["id"]: model["parent"] for model in client.get("/models").json()["data"]}
            assert parents == {"demo": None, **dict.fromkeys(NAMES, "demo")}
            body = {"prompt": "Question:", "max_tokens": 1, "logprobs": 0, "temperature": 0}
            found = [client.post("/completions", json=body | {"model": name}).json() for name in ["demo", *NAMES]]
            logprobs = {one["choices"][0]["logprobs"]["token_logprobs"][0] for one in found}
            assert len(logprobs) == 4, "each name has log-probabilities of its own"
        server.process.terminate()
        server.process.wait(120)
    assert "Traceback" not in server.log_file.read_text()
