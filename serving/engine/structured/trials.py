"""Compiles grammars on trial in separate processes, so that expensive grammars do not affect the server.

A quick lane tries each new grammar for a short time. If that time is not enough, the grammar moves to a slow lane with
one process, so that ordinary grammars never wait behind expensive ones. Both lanes are bounded. Each takes first a
grammar of the client with the fewest trials in progress.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any

from serving.core.errors import RequestError
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


class _Lane:
    """Waiting grammars and free processes; one thread drives each process."""

    def __init__(self, seconds: float, processes: int) -> None:
        self.seconds = seconds
        self.threads = ThreadPoolExecutor(processes, thread_name_prefix="grammar-trial")
        self.waiting: list[_Trial] = []
        self.trying: Counter[str | None] = Counter()
        """Number of grammars of each client under trial here."""
        self.processes: list[_TrialProcess] = []


class GrammarTrials:
    """Tries grammars. Several threads may use it.

    Args:
        settings: returns the vocabulary in the format that the process reads.
        seconds: maximum processor time for one grammar.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]], seconds: float) -> None:
        self._settings, self._seconds = settings, seconds
        self._lock = threading.Lock()
        quick = min(QUICK_SECONDS, seconds)
        self._lanes = [_Lane(quick, _QUICK_PROCESSES)] + ([_Lane(seconds, 1)] if seconds > quick else [])
        self._waiting: Counter[str | None] = Counter()
        """Number of grammars of each client in both lanes, those under trial included."""
        self._processes: set[_TrialProcess] = set()
        self._closed = False
        weakref.finalize(self, _stop_all, self._processes)

    def submit(self, grammar: str, client: str | None = None) -> Future[dict[str, Any]]:
        """Tries a grammar (`StructuredOutputs.key`): the result is its form and size, or an error.

        `client` is the sender of the grammar; the limit per client does not apply to None. The result raises
        RequestError with `retry` if no process became free or could be started.

        Raises:
            RequestError: too many grammars are waiting.
        """
        trial = _Trial(grammar, client)
        with self._lock:
            most = _WAITING if client is None else _WAITING_OF_CLIENT
            if self._waiting.total() >= _WAITING or self._waiting[client] >= most:
                raise _too_many()
            self._waiting[client] += 1
        self._enter(self._lanes[0], trial)
        return trial.result

    def close(self) -> None:
        """Ends all trials; waiting grammars, and those under trial, fail."""
        self._closed = True
        for process in list(self._processes):
            process.process.kill()

    def _enter(self, lane: _Lane, trial: _Trial) -> None:
        with self._lock:
            lane.waiting.append(trial)
        lane.threads.submit(self._run_next, lane)

    def _run_next(self, lane: _Lane) -> None:
        """Tries one waiting grammar, and sets its result or moves it to the slow lane. Runs in a thread of the lane."""
        with self._lock:
            trial = min(lane.waiting, key=lambda each: lane.trying[each.client])
            lane.waiting.remove(trial)
            lane.trying[trial.client] += 1
        answer: dict[str, Any] | BaseException | None
        try:
            if self._closed or time.monotonic() > trial.until:
                raise _too_many()
            answer = self._try(lane, trial.grammar)
        except BaseException as error:
            answer = error
        if self._closed:
            answer = _too_many()
        moves = answer is None and lane is not self._lanes[-1]
        with self._lock:
            lane.trying -= Counter([trial.client])
            self._waiting -= Counter([] if moves else [trial.client])
        if moves:
            trial.until = time.monotonic() + _PATIENCE
            self._enter(self._lanes[-1], trial)
        elif isinstance(answer, BaseException):
            trial.result.set_exception(answer)
        else:
            late = f"the grammar takes more than {self._seconds:g} seconds to compile"
            trial.result.set_result({"error": late} if answer is None else answer)

    def _try(self, lane: _Lane, grammar: str) -> dict[str, Any] | None:
        """Returns the result of a grammar's trial; None if the trial exceeds the time limit of this lane."""
        process = lane.processes.pop() if lane.processes else None
        if process is not None and process.process.poll() is not None:  # another program ended the process
            self._processes.discard(process)
            process = None
        if process is None:
            process = _TrialProcess()
            self._processes.add(process)
        try:
            if self._closed:  # `close` may not have seen the process
                raise _too_many()
            if not process.greeted:
                process.greet(self._settings() | {"memory": MEMORY, "seconds": lane.seconds})
            # The process limits its own processor time. On a busy machine, more wall-clock time passes.
            answer = process.exchange(grammar, 3 * lane.seconds + 5)
        except BaseException:
            self._end(process)
            raise
        if answer is not None:
            lane.processes.append(process)
            return answer
        self._end(process)
        if process.process.returncode in (-24, -9):  # SIGXCPU, or SIGKILL from this module
            return None
        return {"error": f"the grammar takes more than {MEMORY >> 20} MiB to compile"}

    def _end(self, process: _TrialProcess) -> None:
        self._processes.discard(process)
        process.stop()


class _TrialProcess:
    """A process that runs `grammar_trial`, and the connection to it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self.greeted = False
        # -P keeps the folder off the module path, because some of its files have names of standard modules.
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", grammar_trial.__file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must reach only the parent process
            )

    def greet(self, settings: dict[str, Any]) -> None:
        """Sends the vocabulary and the limits.

        Raises:
            RequestError: the process cannot use them, or has ended.
        """
        greeting = self.exchange(json.dumps(settings), None)
        if greeting is None or "error" in greeting:
            why = "the process that tries grammars has ended" if greeting is None else greeting["error"]
            raise RequestError(f"structured outputs: {why}", retry=greeting is None)
        self.greeted = True

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self._connection.close()
        self.process.wait()

    def exchange(self, message: str, seconds: float | None) -> dict[str, Any] | None:
        """Returns the process's answer; None if the process has ended, or was killed after so many seconds."""
        with contextlib.suppress(OSError, EOFError):
            self._connection.send_bytes(message.encode())
            if not self._connection.poll(seconds):
                self.process.kill()
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
            return answer
        return None


def _too_many() -> RequestError:
    return RequestError("structured outputs: too many grammars are being compiled: try again later", retry=True)


def _stop_all(processes: set[_TrialProcess]) -> None:
    for process in processes:
        process.stop()
