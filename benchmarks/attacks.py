"""What hostile requests do to others: each request of the hostile list against a server, a router and a prefill worker.

    python -m benchmarks.attacks [--place router] [--only TEXT] [--tries 3]

Runs in a checkout, because the list is that of the tests (`tests/support/servers/hostile_requests.py`), with the odd
messages between workers (`tests/serving/split/test_odd_messages.py`). All processes have asyncio's debug mode, which
logs every callback that holds up the event loop for more than 100 ms. While a request runs, another client streams,
and a probe asks `/ping`, which waits for the event loop alone. Prints a line per request, and at the end what counts as
a fault: a status of 5xx but 503, and, in every try, a callback above 100 ms, or too much memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.serving.split.test_odd_messages import MESSAGES
from tests.support.fleets.processes import Process, router, running, worker
from tests.support.servers.bystander import MOST_BYTES, Bystander
from tests.support.servers.hostile_requests import HOSTILE, MIB, Hostile

MOST_GAP = 0.1
"""Seconds that one request may hold up an event loop."""
_SLOW = re.compile(r"Executing .* took ([0-9.]+) seconds")
_FLAGS = ("--header-timeout=2", "--body-timeout=3", "--no-log-requests")


@dataclass
class Effect:
    """What one try of a request did."""

    statuses: set[int]
    slowest: float = 0.0
    """Seconds of the longest callback that an event loop logged."""
    probe: float = 0.0
    """Seconds that the slowest answer to a probe took, less what held up the probe itself."""
    stream: float = 0.0
    """Seconds between two events of another client's stream."""
    grown: int = 0
    """Bytes by which a process grew."""


class Probe(threading.Thread):
    """Asks `/ping` again and again on one connection. Used as a context."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
        self._over = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        while not self._over.wait(0.002):
            begin, cpu = time.monotonic(), time.thread_time()
            self._connection.request("GET", "/ping")
            self._connection.getresponse().read()
            self.longest = max(self.longest, time.monotonic() - begin - (time.thread_time() - cpu))

    def __enter__(self) -> Probe:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(60)


def odd_messages() -> Iterator[Hostile]:
    """Messages between workers with fields of other types and sizes, a request for each path."""
    for path, bodies in MESSAGES.items():

        def send(url: str, path: str = path, bodies: list[dict] = bodies) -> set[int]:
            with httpx.Client(base_url=url, timeout=60, headers={"content-type": "application/json"}) as client:
                return {client.post(path, content=json.dumps(body)).status_code for body in bodies}

        yield Hostile(f"odd messages to {path}", set(range(200, 500)) | {503}, send)


def tried(hostile: Hostile, url: str, processes: list[Process]) -> Effect:
    """Sends a request once."""
    begins = [each.log_file.stat().st_size for each in processes]
    pids = [each.process.pid for each in processes]
    with Bystander(url, pids) as bystander, Probe(url) as probe:
        effect = Effect(hostile.send(url))
    effect.probe, effect.stream, effect.grown = probe.longest, bystander.longest, bystander.grown
    for each, begin in zip(processes, begins, strict=True):
        with each.log_file.open() as log:
            log.seek(begin)
            effect.slowest = max([effect.slowest, *map(float, _SLOW.findall(log.read()))])
    return effect


def faults(hostile: Hostile, tries: list[Effect]) -> list[str]:
    """Says what is wrong with a request's effects; noise of the machine is not there in every try."""
    found = [f"status {code}" for each in tries for code in each.statuses - hostile.allowed if code >= 500]
    if (gap := min(each.slowest for each in tries)) > MOST_GAP:
        found.append(f"the event loop stood still for {gap:.3f} s")
    if (grown := min(each.grown for each in tries)) > MOST_BYTES:
        found.append(f"{grown / MIB:.0f} MiB more")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", action="append", choices=("server", "router", "prefill"), help="Default: all.")
    parser.add_argument("--only", action="append", help="Only requests whose names contain this; repeatable.")
    parser.add_argument("--tries", type=int, default=3, help="Tries of a request that seems to be a fault.")
    options = parser.parse_args()
    os.environ["PYTHONASYNCIODEBUG"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="attacks-"))
    large = {"max_model_len": 4096, "num_pages": 1100}
    server, prefill = (
        worker(role, folder, *_FLAGS, "--grammar-timeout=2", "--warmup", **large) for role in ("decode", "prefill")
    )
    front = router([prefill], [server], folder, *_FLAGS)
    wanted = options.only or [""]
    places = {"server": [server], "router": [front, server, prefill], "prefill": [prefill]}
    print(f"logs in {folder}; ms: event loop, probe, stream", flush=True)
    wrong = []
    with running(server, prefill, front, seconds=900):
        for place in options.place or places:
            processes = places[place]
            more = [] if place == "router" else list(odd_messages())
            for hostile in (each for each in [*HOSTILE, *more] if any(text in each.name for text in wanted)):
                tries = [tried(hostile, processes[0].url, processes)]
                while faults(hostile, tries) and len(tries) < options.tries:
                    tries.append(tried(hostile, processes[0].url, processes))
                best = min(tries, key=lambda each: each.slowest)
                gaps = " ".join(f"{1000 * each:5.0f}" for each in (best.slowest, best.probe, best.stream))
                statuses = " ".join(map(str, sorted(best.statuses)))
                print(f"{place:8} {gaps} {best.grown / MIB:5.0f} MiB  {statuses:16} {hostile.name}", flush=True)
                wrong += [f"{place}: {hostile.name}: {fault}" for fault in faults(hostile, tries)]
    print("\n".join(wrong) or "no fault")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
