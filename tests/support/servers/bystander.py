"""Another client of a server, which must notice nothing of a hostile one."""

import os
import threading
import time
from pathlib import Path

import httpx

from tests.support.servers.hostile_requests import COMPLETIONS, MIB, Hostile

MOST_SECONDS_BETWEEN = 1.0 if "CI" in os.environ else 0.25
"""Between two events of a bystander's stream, the first one's wait included, beyond what held up the bystander itself.
Machines of a CI share their cores."""
_TRIES = 3
"""A pause that a request causes is there every time; one by something else on the machine is not."""
MOST_BYTES = 300 << 20
"""By which a process's resident memory may grow."""


class Bystander:
    """Another client, with one short stream after the other, and a probe between them. Used as a context."""

    def __init__(self, url: str, pids: list[int]) -> None:
        self._url, self._pids = url, pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: BaseException | None = None
        self._clock = threading.Thread(target=self._watch_the_clock, daemon=True)
        self._held_up: list[tuple[float, float]] = []
        """When this process came late to a moment of its own, and by how many seconds."""
        self.streams = 0
        self.longest = 0.0
        """Seconds between two events, or without an answer to a probe."""
        self.grown = 0
        """Bytes by which a process grew at its largest."""

    def __enter__(self) -> "Bystander":
        self._before = {pid: _memory(pid, "VmRSS") for pid in self._pids}
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted anew
        self._clock.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._clock.join(60)
        self._thread.join(60)
        assert not self._thread.is_alive(), "a bystander's stream does not end"
        if self._failure is not None:
            raise self._failure
        self.grown = max(_memory(pid, "VmHWM") - self._before[pid] for pid in self._pids)

    def _run(self) -> None:
        body = {"prompt": "Another client", "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            with httpx.Client(base_url=self._url, timeout=60.0) as client:
                while not (self._stop.is_set() and self.streams):
                    last = time.monotonic()
                    with client.stream("POST", COMPLETIONS, json=body) as answer:
                        assert answer.status_code == 200, answer.read()
                        for line in answer.iter_lines():
                            assert '"error"' not in line, line
                            last = self._waited_since(last)
                    assert client.get("/health").status_code == 200
                    self._waited_since(last)
                    self.streams += 1
        except BaseException as error:
            self._failure = error

    def _waited_since(self, last: float) -> float:
        """Notes the pause that ends now, less what this process was held up in it; returns what the time is."""
        now = time.monotonic()
        own = sum(late for at, late in list(self._held_up) if last <= at <= now)
        self.longest = max(self.longest, now - last - own)
        return now

    def _watch_the_clock(self) -> None:
        while not self._stop.is_set():
            due = time.monotonic() + 0.005
            time.sleep(0.005)
            late = time.monotonic() - due
            if late > 0.005:
                self._held_up.append((due + late, late))


def _memory(pid: int, name: str) -> int:
    """A line of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def check_bystanders_are_unaffected(hostile: Hostile, url: str, pids: list[int]) -> None:
    """Sends it while a bystander streams: it ends as expected, and affects neither the bystander nor memory."""
    pauses = []
    for _ in range(_TRIES):
        with Bystander(url, pids) as bystander:
            answers = hostile.send(url)
        assert answers <= hostile.allowed, answers
        assert bystander.grown < MOST_BYTES, f"{bystander.grown / MIB:.0f} MiB more"
        pauses.append(bystander.longest)
        if bystander.longest < MOST_SECONDS_BETWEEN:
            return
    raise AssertionError(f"every time there were seconds without an event: {', '.join(f'{s:.3f}' for s in pauses)}")
