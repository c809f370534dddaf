"""Compiles grammars on trial in separate processes, so that expensive grammars do not affect the server.

A quick lane tries each new grammar for a short time. If that time is not enough, the grammar moves to a slow lane with
one process, so that ordinary grammars never wait behind expensive ones. Both lanes are bounded, and each client has at
most one trial at a time in a lane.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from serving.engine.request_error import RequestError
from serving.engine.structured import grammar_trial

MEMORY = 256 << 20
"""Maximum bytes for compiling one grammar."""
QUICK_SECONDS = 0.5
"""Processor time of the first, short trial."""
_QUICK_PROCESSES = 2
_WAITING, _WAITING_OF_CLIENT = 64, 16
"""Maximum number of grammars that wait for a trial: of all clients, and of one client."""
_PATIENCE = 30.0
"""Maximum seconds that a grammar waits for a process."""


@dataclass(slots=True, eq=False)
class _Trial:
    grammar: str
    client: str | None
    result: Future[dict[str, Any]] = field(default_factory=Future)
    until: float = field(default_factory=lambda: time.monotonic() + _PATIENCE)


class GrammarTrials:
    """Tries grammars. Several threads may use it.

    Args:
        settings: returns the vocabulary in the format that the process reads.
        seconds: maximum processor time for one grammar.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]], seconds: float) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        quick = min(QUICK_SECONDS, seconds)
        self._quick = _Lane(quick, _QUICK_PROCESSES)
        self._slow = _Lane(seconds, 1) if seconds > quick else None
        self._seconds = seconds
        self._waiting: Counter[str | None] = Counter()
        """Number of grammars of each client in both lanes, those under trial included."""
        self._processes: set[subprocess.Popen[bytes]] = set()
        weakref.finalize(self, _stop_all, self._processes)

    def submit(self, grammar: str, client: str | None = None) -> Future[dict[str, Any]]:
        """Tries a grammar (`StructuredOutputs.key`): the result is its form and size, or an error.

        `client` is the sender of the grammar; the limit per client does not apply to None. The result raises
        RequestError with `retry` if no process became free or could be started.

        Raises:
            RequestError: too many grammars are waiting.
        """
        with self._lock:
            most = _WAITING if client is None else _WAITING_OF_CLIENT
            if self._waiting.total() >= _WAITING or self._waiting[client] >= most:
                raise _too_many()
            self._waiting[client] += 1
            trial = _Trial(grammar, client)
            self._quick.waiting.append(trial)
        self._quick.threads.submit(self._run_next, self._quick)
        return trial.result

    def close(self) -> None:
        """Ends all trials; waiting grammars fail."""
        with self._lock:
            waiting = [trial for lane in (self._quick, self._slow) if lane is not None for trial in lane.waiting]
            for trial in waiting:
                trial.until = 0.0
        for process in list(self._processes):
            process.kill()

    def _run_next(self, lane: _Lane) -> None:
        """Tries the first grammar of a client that has no other trial in this lane. Runs in a thread of the lane."""
        with self._lock:
            trial = next((each for each in lane.waiting if each.client not in lane.trying), None)
            if trial is None:
                return  # called again when the client's other trial ends
            lane.waiting.remove(trial)
            if trial.client is not None:
                lane.trying.add(trial.client)
        moved = False
        try:
            moved = self._run(lane, trial)
        except BaseException as error:
            self._forget(trial)
            trial.result.set_exception(error)
        finally:
            with self._lock:
                lane.trying.discard(trial.client)
                more = bool(lane.waiting)
            if more:
                lane.threads.submit(self._run_next, lane)
            if moved and self._slow is not None:
                self._slow.threads.submit(self._run_next, self._slow)

    def _run(self, lane: _Lane, trial: _Trial) -> bool:
        """Tries a grammar and sets its result. Returns whether the grammar moved to the slow lane instead."""
        if time.monotonic() > trial.until:
            raise _too_many()
        answer = self._try(lane, trial.grammar)
        if answer is None:
            if lane is self._quick and self._slow is not None:
                with self._lock:
                    trial.until = time.monotonic() + _PATIENCE
                    self._slow.waiting.append(trial)
                return True
            answer = {"error": f"the grammar takes more than {self._seconds:g} seconds to compile"}
        self._forget(trial)
        trial.result.set_result(answer)
        return False

    def _forget(self, trial: _Trial) -> None:
        with self._lock:
            self._waiting[trial.client] -= 1
            if not self._waiting[trial.client]:
                del self._waiting[trial.client]

    def _try(self, lane: _Lane, grammar: str) -> dict[str, Any] | None:
        """Returns the result of a grammar's trial; None if the trial exceeds the time limit of this lane."""
        process = lane.processes.pop() if lane.processes else None
        if process is not None and process.poll() is not None:  # another program ended the process
            self._processes.discard(process)
            process = None
        try:
            process = process or self._start(lane)
            answer = self._ask(process, grammar, lane.seconds)
        except BaseException:
            if process is not None:
                self._end(process)
            raise
        if answer is not None:
            lane.processes.append(process)
            return answer
        self._end(process)
        if process.returncode in (-24, -9):  # SIGXCPU, or SIGKILL from this module
            return None
        return {"error": f"the grammar takes more than {MEMORY >> 20} MiB to compile"}

    def _start(self, lane: _Lane) -> subprocess.Popen[bytes]:
        # -P keeps the folder off the module path, because some of its files have names of standard modules.
        process = subprocess.Popen(
            [sys.executable, "-P", grammar_trial.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the parent process
        )
        self._processes.add(process)
        self._write(process, self._settings() | {"memory": MEMORY, "seconds": lane.seconds})
        assert process.stdout is not None
        greeting = grammar_trial.read_frame(process.stdout)  # type: ignore[arg-type]
        if greeting is None or "error" in greeting:
            self._end(process)
            why = "the process that tries grammars has ended" if greeting is None else greeting["error"]
            raise RequestError(f"structured outputs: {why}", retry=greeting is None)
        return process

    def _ask(self, process: subprocess.Popen[bytes], grammar: str, seconds: float) -> dict[str, Any] | None:
        """Returns the process's answer; None if the process has ended or was killed."""
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._write(process, json.loads(grammar))
        # The process limits its own processor time. On a busy machine, more wall-clock time passes.
        if not select.select([process.stdout], [], [], 3 * seconds + 5)[0]:
            process.kill()
        found: dict[str, Any] | None = grammar_trial.read_frame(process.stdout)  # type: ignore[arg-type]
        return found

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.discard(process)
        _stop(process)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        grammar_trial.write_frame(process.stdin, value)  # type: ignore[arg-type]


class _Lane:
    """Waiting grammars and free processes; one thread drives each process."""

    def __init__(self, seconds: float, processes: int) -> None:
        self.seconds = seconds
        self.threads = ThreadPoolExecutor(processes, thread_name_prefix="grammar-trial")
        self.waiting: deque[_Trial] = deque()
        self.trying: set[str | None] = set()
        """Clients that have a grammar under trial here."""
        self.processes: list[subprocess.Popen[bytes]] = []


def _too_many() -> RequestError:
    return RequestError("structured outputs: too many grammars are being compiled: try again later", retry=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def _stop_all(processes: set[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _stop(process)
