"""Several processes of `engine_host`, as hosts of one engine."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.engines.engines import QUICK_XLA_FLAGS
from tests.support.fleets.processes import free_port
from tests.support.waiting import line_of

ROOT = Path(__file__).resolve().parents[3]


class Hosts:
    """Starts them at once; leave the context to be rid of them."""

    def __init__(self, folder: Path, count: int, directory: Path, rounds: list[dict], **job) -> None:
        port = free_port()
        environment = os.environ | {"XLA_FLAGS": QUICK_XLA_FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.logs = [folder / f"host-{host}.log" for host in range(count)]
        self.processes = []
        for host, log in enumerate(self.logs):
            described = {"port": port, "hosts": count, "host": host, "directory": str(directory), "rounds": rounds}
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.fleets.engine_host", json.dumps(described | job)],
                        env=environment,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                    )
                )

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

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

    def seconds_to_end(self, hosts: list[int]) -> float:
        """How long it takes from now until all of these have ended."""
        begin = time.monotonic()
        for host in hosts:
            self.end(host)
        return time.monotonic() - begin
