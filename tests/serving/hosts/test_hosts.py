"""Several processes run one engine (`jax.distributed`; on CPU, XLA exchanges by gloo) and say what one says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from mamba_jax.programs import StepPrograms
from serving.config import EngineConfig
from serving.engine.assembly import build
from tests.support.engines.engines import QUICK_COMPILE, QUICK_XLA_FLAGS
from tests.support.fleets.engine_host import FLAGS, answers
from tests.support.fleets.processes import free_port
from tests.support.models.divisible_checkpoints import EIGHT, FAMILIES, write_checkpoint
from tests.support.selection import slow
from tests.support.waiting import line_of

pytestmark = pytest.mark.full

MTP = {"num_speculative_tokens": 2, "speculative_method": "mtp"}
NGRAM = {"num_speculative_tokens": 2, "speculative_method": "ngram"}


class Hosts(contextlib.ExitStack):
    """Processes of `engine_host`, as hosts of one engine. Leave the context to be rid of them."""

    def __init__(self, folder: Path, count: int, directory: Path, rounds: list[dict], **job) -> None:
        super().__init__()
        port = free_port()
        environment = os.environ | {"XLA_FLAGS": QUICK_XLA_FLAGS, "JAX_PLATFORMS": "cpu"}
        self.logs = [folder / f"host-{host}.log" for host in range(count)]
        self.processes = []
        for host, log in enumerate(self.logs):
            described = {"port": port, "hosts": count, "host": host, "directory": str(directory), "rounds": rounds}
            command = [sys.executable, "-m", "tests.support.fleets.engine_host", json.dumps(described | job)]
            with log.open("w") as file:
                options = {"env": environment, "stdout": subprocess.PIPE, "stderr": file, "text": True}
                self.processes.append(self.enter_context(subprocess.Popen(command, **options)))
            self.callback(self.processes[-1].kill)

    def results(self) -> list[dict]:
        """What each has printed."""
        lines = []
        for process, log in zip(self.processes, self.logs, strict=True):
            line = line_of(process, 600)
            while line and not line.startswith("{"):  # XLA's collectives tell of themselves
                line = line_of(process, 600)
            assert line, log.read_text()[-3000:]
            lines.append(json.loads(line))
        return lines

    def end(self, host: int, seconds: float = 60.0) -> tuple[int, str]:
        """Exit status and log of a host that ends by itself."""
        return self.processes[host].wait(seconds), self.logs[host].read_text()


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    """Compiling takes most of these tests' time, and the programs' speed does not matter."""
    monkeypatch.setattr(build, "StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE))


def alone(directory):
    """What one process with one device says, without caching and drafts."""
    built = build.build_engine(EngineConfig.create(**FLAGS, model=str(directory), mamba_cache_mode="none"))
    return answers(built.engine)[0]


def check(hosts, expected, modes, *, held=0.75):
    """`held`: the most of all weights that a host has."""
    results = hosts.results()
    said = results[0]["said"]
    assert [tokens for tokens, _ in said] == [expected] * len(modes)
    # The first prompt again: all of it, where what it needs was kept.
    assert [cached[0] for _, cached in said] == [{"none": 0}.get(mode, 36) for mode in modes]
    for each in results:  # its own pieces and no others: half, and what every device has
        assert each["copied"] == each["held"] <= held * each["whole"]
    return results


def test_two_hosts_say_what_one_says_and_end_together(tmp_path):
    directory = write_checkpoint(tmp_path / "model", FAMILIES["nemotronh-moe"])
    modes = ["none", "all", "align", "all"]
    rounds = [{"mamba_cache_mode": mode} | ({} if i in (0, 3) else MTP) for i, mode in enumerate(modes)]
    rounds[1] |= {"mixed_steps": True}
    with Hosts(tmp_path, 2, directory, rounds) as hosts:
        expected = alone(directory)
        check(hosts, expected, modes)
        hosts.processes[1].send_signal(signal.SIGKILL)
        status, log = hosts.end(0)
    assert status == 1
    assert "host 1 is lost: it closed the connection: all hosts exit" in log


@pytest.mark.parametrize("pairs", [True, slow(False)])
def test_members_on_two_hosts_say_what_one_says(pairs, tmp_path):
    """Each has all weights, half of the pages, and half of the tokens of a prefill step, of which recurrences exchange
    states or inputs."""
    directory = write_checkpoint(tmp_path / "model", FAMILIES["nemotronh-moe"])
    rounds = [MTP | {"mamba_cache_mode": mode, "context_parallel_size": 2} for mode in ("all", "align")]
    with Hosts(tmp_path, 2, directory, rounds, least_tokens=4, pairs=pairs) as hosts:
        results = check(hosts, alone(directory), ["all", "align"], held=1)
    assert all(each["slow"] for each in results)


@pytest.mark.slow
def test_four_hosts_with_two_kinds_of_drafts(tmp_path):
    """In the end one is frozen, as if its cable were cut: its connections stand, and nothing comes."""
    directory = write_checkpoint(tmp_path / "model", EIGHT)
    modes = ["all", "align", "none", "all"]
    rounds = [{"mamba_cache_mode": mode} | (NGRAM if i != 1 else {}) for i, mode in enumerate(modes)]
    rounds[3] |= {"replay_interval": 8}
    with Hosts(tmp_path, 4, directory, rounds) as hosts:
        expected = alone(directory)
        check(hosts, expected, modes)
        hosts.processes[2].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert [hosts.end(host)[0] for host in (0, 1, 3)] == [1, 1, 1]
        seconds = time.monotonic() - begin
        for host in (0, 1, 3):
            assert "host 2 is lost" in hosts.end(host)[1]
    assert seconds < 10


@pytest.mark.slow
def test_two_processes_that_each_schedule_say_what_one_says(tmp_path):
    directory = write_checkpoint(tmp_path / "model", FAMILIES["mamba2"])
    with Hosts(tmp_path, 2, directory, [NGRAM | {"mamba_cache_mode": "all"}], led=False) as hosts:
        results = check(hosts, alone(directory), ["all"])
    assert results[0]["said"] == results[1]["said"]
