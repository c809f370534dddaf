"""Two processes with one device each run one model (`jax.distributed`; on CPU, XLA exchanges by gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from serving import LLM, SamplingParams
from serving.engine.assembly.devices import scheduler_clock
from tests.support.engines.engines import QUICK_XLA_FLAGS
from tests.support.fleets.generate_in_two_processes import PROMPT, SAMPLING, SIZES
from tests.support.fleets.processes import free_port
from tests.support.models.divisible_checkpoints import FAMILIES, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]


def test_the_clock_of_marks_stands_still_if_several_processes_schedule(monkeypatch):
    for processes, led, runs in ((1, False, True), (2, True, True), (2, False, False)):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        assert (scheduler_clock(led=led)() > 0) == runs


@pytest.mark.slow
def test_two_processes_say_what_one_says(tmp_path):
    directory = write_checkpoint(tmp_path, FAMILIES["mamba2"])
    program, port = "tests.support.fleets.generate_in_two_processes", free_port()
    environment = os.environ | {"XLA_FLAGS": QUICK_XLA_FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", program, str(port), str(number), str(directory)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        done = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], done
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in done)
    assert first == second

    llm = LLM(directory, **SIZES)
    expected = llm.generate(PROMPT, SamplingParams(**SAMPLING), use_tqdm=False)[0].outputs[0].token_ids
    assert [tokens for tokens, _ in first] == [expected, expected]
    assert [cached for _, cached in first] == [0, 42]
