"""A small fleet of processes under load, and what may go wrong in it."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
import openai

from serving.split.http.peer import SealAuth
from serving.split.seal import Seal
from tests.support.fleets.processes import Process, router, running, streamed, worker
from tests.support.servers.stoppable_worker import Stages

SECRET = "known to this fleet alone"
AUTH = SealAuth(Seal(SECRET))
"""Of messages to workers with this secret."""
_SEALED = ("--transport=tcp", f"--split-secret={SECRET}")
DEADLINE = 45.0
"""Seconds in which the router has to have begun an answer."""
_SLACK = 60.0
"""Seconds beyond it for the rest of the answer, on a machine that does other things too."""
PROMPTS = [f"{word} {'and so on ' * (3 + i % 5)}" for i, word in enumerate("abcdefgh")]
LENGTHS = (4, 24)
TEXT = "The prefill worker computes the prompt once and the decode worker goes on from its state. " * 2


@dataclass
class Outcomes:
    """What became of requests."""

    right: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """Seconds of those that took too long."""

    @property
    def line(self) -> str:
        counts = f"{len(self.errors)} ended with an error, {len(self.wrong)} wrong, {len(self.late)} hung"
        return f"{self.right} right, {counts}"

    def of(
        self, count: int, at_once: int, ask: Callable[[int], tuple[Any, Any]], *, errors: tuple[type[Exception], ...]
    ) -> Self:
        """Adds those of so many requests, some at once. `ask`: sends one by its number; its answer, and the right one.
        `errors`: what a request may end with; others are raised. Returns itself."""

        def one(number: int) -> tuple[float, Any, Any, str]:
            begin, found, right, error = time.monotonic(), None, None, ""
            try:
                found, right = ask(number)
            except errors as failure:
                error = f"{type(failure).__name__}: {failure}"[:300]
            return time.monotonic() - begin, found, right, error

        with ThreadPoolExecutor(at_once) as pool:
            for seconds, found, right, error in pool.map(one, range(count)):
                self.right += not error and found == right
                self.errors += [error] if error else []
                self.wrong += [f"{found} instead of {right}"] if found != right else []
                self.late += [seconds] if seconds > DEADLINE + _SLACK else []
        return self


UNLIKE = {"page_size": 32}
DRAFTS = {"num_speculative_tokens": 2, "speculative_method": "ngram"}


class Fleet:
    """Workers and a router as processes that can be stopped at stages, killed and started again.

    Call `begin` before use, and `close` in any case.

    Args:
        folder: for logs and stages.
        prefill: options of the engine of each prefill worker.
        decode: the same of decode workers.
    """

    flags: ClassVar[dict[str, tuple[str, ...]]] = {"prefill": ("--lease=4",), "decode": ()}
    """Of the workers of a role."""
    auth: ClassVar[httpx.Auth | None] = None

    def __init__(self, folder: Path, prefill: Sequence[dict], decode: Sequence[dict]) -> None:
        self.folder, self.stages = folder, Stages(folder)
        self._options: dict[int, tuple[str, dict]] = {}
        """Role and options of the engine by port."""
        self.prefill = [self.start("prefill", **engine) for engine in prefill]
        self.decode = [self.start("decode", **engine) for engine in decode]
        self.front = self.route()

    def begin(self) -> None:
        """Returns when all are ready."""
        for each in (*self.workers, self.front):
            each.wait_until_ready(600)

    def close(self) -> None:
        """End everything, also what is stopped."""
        for each in (self.front, *self.workers):
            if each.process.poll() is None:
                each.process.send_signal(signal.SIGCONT)
            each.close()

    @property
    def workers(self) -> list[Process]:
        """All but the router."""
        return [*self.prefill, *self.decode]

    def start(self, role: str, *more: str, port: int | None = None, **engine) -> Process:
        """A worker of this fleet; `engine` are options of its engine."""
        started = worker(role, self.folder, *self.flags[role], *more, port=port, stages=self.folder, **engine)
        self._options[started.port] = role, engine
        return started

    def restart(self, old: Process, *more: str) -> Process:
        """Kills a worker (SIGKILL) that still runs, and starts it again at its port; returns when it is ready."""
        if old.process.poll() is None:
            old.kill()
        role, engine = self._options[old.port]
        started = self.start(role, *more, port=old.port, **engine)
        workers = self.prefill if role == "prefill" else self.decode
        workers[workers.index(old)] = started
        started.wait_until_ready(600)
        return started

    def route(self, *more: str, port: int | None = None) -> Process:
        """A router in front of the fleet; `more` are further options."""
        return router(self.prefill, self.decode, self.folder, *more, port=port)

    def assert_at_rest(self, *survivors: Process, seconds: float = 20.0) -> None:
        """No place, slot or page is taken any more on these workers (without arguments: all): pools balance, leases
        have run out."""
        for each in survivors or self.workers:
            idle = each.idle(seconds, self.auth)
            assert idle, (each.url, each.get("/split/status", self.auth), each.get("/status")["stats"], each.log())


class LoadedFleet(Fleet):
    """Two prefill workers and a decode worker with a secret, under load, with leases and deadlines of seconds.

    Args:
        folder: for logs and stages.
        unlike: the workers differ in page sizes and drafts, and there is a second decode worker.
    """

    flags: ClassVar[dict[str, tuple[str, ...]]] = {
        "prefill": (*_SEALED, "--lease=4", "--max-lease=30", "--max-kept=4"),
        "decode": (*_SEALED, "--fetch-timeout=3"),
    }
    auth = AUTH

    def __init__(self, folder: Path, *, unlike: bool = False) -> None:
        super().__init__(folder, [{}, UNLIKE] if unlike else [{}, {}], [DRAFTS, UNLIKE] if unlike else [{}])
        self._right: dict[tuple[str, int], list[int]] = {}

    def begin(self) -> None:
        super().begin()
        for prompt in PROMPTS:
            for length in LENGTHS:
                self._right[prompt, length] = streamed(self.decode[0], prompt, length)
        # Workers compile in the first requests, which no deadline has to allow for; a client may give up first.
        patient = self.route(seconds=600.0)
        with running(patient):
            for at_once in (1, 6):
                asked = (self.ask(3 * len(PROMPTS), at_once, front=patient, seed=-i * at_once) for i in range(1, 6))
                assert any(not outcomes.errors for outcomes in asked)

    def route(self, *more: str, port: int | None = None, seconds: float = DEADLINE) -> Process:
        """A router in front of the fleet; `seconds`: how long a request may wait."""
        own = ("--check-timeout=2", f"--first-token-timeout={seconds:g}", f"--split-secret={SECRET}")
        return super().route(*own, *more, port=port)

    def ask(
        self, count: int, at_once: int, *, front: Process | None = None, seed: int = 0, outcomes: Outcomes | None = None
    ) -> Outcomes:
        """Sends requests, so many at once; none of their prompts is in a cache. Adds to `outcomes`, if given."""

        def one(number: int) -> tuple[list[int], list[int]]:
            prompt, length = random.Random(f"{seed} {number}").choice(list(self._right))
            return streamed(front or self.front, prompt, length, salt=f"{seed} {number}"), self._right[prompt, length]

        return (outcomes or Outcomes()).of(count, at_once, one, errors=(openai.APIError,))

    def leave(self, count: int, seed: int = 0) -> None:
        """Requests of clients that go away at some moment."""

        def one(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            body = {"prompt": rng.choice(PROMPTS), "max_tokens": 200, "stream": True, "cache_salt": f"{seed} {number}"}
            with contextlib.suppress(httpx.HTTPError), httpx.Client(timeout=rng.uniform(0.005, 0.3)) as client:
                with client.stream("POST", f"{self.front.url}/v1/completions", json=body) as answer:
                    for _ in zip(range(rng.randrange(4)), answer.iter_lines(), strict=False):
                        pass

        with ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(count)))

    def assert_at_rest(self, *survivors: Process, seconds: float = 60.0) -> None:
        """In addition, every worker is up again."""
        super().assert_at_rest(*survivors, seconds=seconds)
        self.front.wait_until_ready()
