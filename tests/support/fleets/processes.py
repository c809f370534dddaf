"""Workers and routers as processes of their own, on loopback."""

import contextlib
import fcntl
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import httpx
import openai

from tests.support.engines.engines import QUICK_XLA_FLAGS
from tests.support.waiting import comes_true, is_ready

ENGINE = {
    "model": "demo", "tile_size": 16, "state_block_size": 32, "page_size": 16, "max_model_len": 512, "max_num_seqs": 4,
    "max_num_batched_tokens": 64, "num_slots": 40, "num_pages": 120,
}  # fmt: skip
_leases: list[IO[str]] = []


def free_port() -> int:
    """A port for a process that is yet to start, or to start again. No other run of the tests gets it, nor does the
    system give it to a client: it is below those ports, and a lock on a file keeps it for this process."""
    folder = Path(tempfile.gettempdir()) / f"mamba-jax-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1_000):
        lease = (folder / str(port)).open("w")
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            lease.close()
            continue
        _leases.append(lease)
        return port
    raise AssertionError("no port is free")


class Process:
    """One `mamba-jax` command that listens."""

    def __init__(self, *arguments: str, log_to, port: int | None = None, stages=None) -> None:
        """`stages`: a folder by which it can be stopped (see `stoppable_worker.py`)."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_router = arguments[0] == "router"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_XLA_FLAGS}
        program = ["serving.cli"] if stages is None else ["tests.support.servers.stoppable_worker", str(stages)]
        self.log_file = log_to / f"{arguments[0]}-{self.port}.log"
        command = [sys.executable, "-m", *program, *arguments, "--port", str(self.port)]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait_until_ready(self, seconds: float = 240.0) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            return is_ready(self.url) and self._sees_its_workers()

        assert comes_true(ready, seconds, 0.1), f"not ready: {self.log()}"

    def _sees_its_workers(self) -> bool:
        """A router is ready as soon as one decode worker is up, and until it has seen more, it does without them."""
        status = self.get("/status") if self.is_router else {}
        return all(worker["up"] for role in ("prefill", "decode") for worker in status.get(role, ()))

    def get(self, path: str, auth: httpx.Auth | None = None) -> dict:
        return httpx.get(self.url + path, auth=auth, timeout=30).json()

    def log(self) -> str:
        return self.log_file.read_text()[-4000:]

    def kill(self) -> None:
        """As hard as it goes."""
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def idle(self, seconds: float, auth: httpx.Auth | None) -> bool:
        """Whether a worker's pools come to rest with nothing in use. `auth`: that of its fleet."""

        def rests() -> bool:
            stats, split = self.get("/status")["stats"], self.get("/split/status", auth)
            used = stats["slots"]["used"] + stats.get("pages", {"used": 0})["used"]
            kept = sum(split.get(name, 0) for name in ("kept", "copies", "copied_bytes"))
            return not (stats["running"] or stats["waiting"] or used or kept)

        return comes_true(rests, seconds, 0.1)


def worker(role: str, log_to, *more: str, port: int | None = None, stages=None, **engine) -> Process:
    """A worker of a role; `more` are further options of the command line."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (ENGINE | engine).items()]
    arguments = ("--role", role) if role else ()
    return Process("serve", *arguments, *flags, "--no-warmup", *more, log_to=log_to, port=port, stages=stages)


def router(prefill, decode, log_to, *more: str, port: int | None = None) -> Process:
    """A router in front of these workers."""
    urls = [f"--prefill={each.url}" for each in prefill] + [f"--decode={each.url}" for each in decode]
    return Process("router", *urls, "--check-interval=0.3", *more, log_to=log_to, port=port)


@contextlib.contextmanager
def running(*processes: Process, seconds: float = 240.0):
    """Waits until all are ready; in the end closes them, the last one first."""
    try:
        for each in processes:
            each.wait_until_ready(seconds)
        yield processes
    finally:
        for each in reversed(processes):
            each.close()


def client(process: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="-", max_retries=0, timeout=120)


def streamed(process: Process, prompt, max_tokens: int = 16, on_first=None, salt: str | None = None) -> list[int]:
    """Token ids of a greedy completion, as they stream in. With a salt nothing is found in a cache at first."""
    found: list[int] = []
    pieces = client(process).completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )  # fmt: skip
    for piece in pieces:
        for choice in piece.choices:
            found += getattr(choice, "token_ids", None) or []
        if found and on_first is not None:
            on_first()
            on_first = None
    return found
