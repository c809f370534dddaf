"""Waiting for what another thread or process does."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable

import httpx


def comes_true(condition: Callable[[], object], seconds: float = 60.0, every: float = 0.05) -> bool:
    """Whether a condition holds within so many seconds. While it is asked with an HTTP error, it does not hold."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return True
        time.sleep(every)
    return False


def line_of(process: subprocess.Popen, seconds: float = 120.0) -> str:
    """The next line that a process prints; empty once it has ended. One that prints none in time is killed."""
    late = threading.Timer(seconds, process.kill)
    late.start()
    try:
        return process.stdout.readline()
    finally:
        late.cancel()


def is_ready(url: str) -> bool:
    """Whether the server at a URL is."""
    return httpx.get(f"{url}/ready", timeout=5).status_code == 200
