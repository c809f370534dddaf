"""Kills and stops of hosts at every stage for `--minutes N`: all hosts end in time, and no answer is wrong."""

import collections
import itertools
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.serving.hosts.test_serve import PROMPT, Pair
from tests.support.fleets.processes import Process, streamed, worker

pytestmark = pytest.mark.slow

MEETING = 45
"""Seconds until both hosts must have met; 10 s later they have ended."""
START_UP = 60.0
"""Seconds that a host takes before it begins to meet the other one, on a machine that does other things too."""
STAGES = {"starting": START_UP + MEETING + 10.0, "loading": 30.0, "serving": 15.0, "draining": 30.0}
"""Seconds in which the other host must end, from the fault on."""
FAULTS = (signal.SIGKILL, signal.SIGSTOP)
LENGTH = 100


def stream(leader: Process, begun: threading.Event) -> list[int] | None:
    """Tokens of one stream; None if the server has ended."""
    try:
        return streamed(leader, PROMPT, LENGTH, on_first=begun.set)
    except (openai.APIError, OSError):
        return None
    finally:
        begun.set()


def play(folder, stage: str, fault: signal.Signals, victim: int, expected: list[int], rng: random.Random) -> list[str]:
    """One life of two hosts; returns what went wrong."""
    with Pair(folder, "--meeting-timeout", str(MEETING)) as pair, ThreadPoolExecutor(3) as clients:
        leader, other = pair.hosts[0], pair.hosts[1 - victim]
        streams, begun = [], threading.Event()
        if stage == "starting":
            time.sleep(rng.uniform(0.0, 8.0))
        elif stage == "loading":
            wait_for(leader, "host 0 of 2")
            time.sleep(rng.uniform(0.0, 3.0))
        else:
            leader.wait_until_ready(300)
            streams = [clients.submit(stream, leader, begun) for _ in range(3)]
            assert begun.wait(120)
        if stage == "draining":
            pair.hosts[rng.randrange(2)].process.send_signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, 1.0))
        begin, found = time.monotonic(), []
        pair.hosts[victim].process.send_signal(fault)
        try:
            status = other.process.wait(STAGES[stage])
            seconds = time.monotonic() - begin
            pair.hosts[victim].process.send_signal(signal.SIGCONT)
            pair.hosts[victim].process.wait(STAGES[stage])
            found += [f"wrong: {said}" for each in streams if (said := each.result(60)) not in (None, expected)]
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            pair.close()  # or the streams would be waited for
            return [f"hung: {error}: {other.log()[-300:]}"]
        # JAX aborts a follower whose leader is lost before the two have met.
        allowed = {1, 2} | ({0} if stage == "draining" else set())
        allowed |= {-signal.SIGABRT} if (stage, victim) == ("starting", 0) else set()
        if status not in allowed:
            found.append(f"exit code {status}: {other.log()[-600:]}")
        print(
            f"{stage} {fault.name} of host {victim}: exit code {status} after {seconds:.1f} s {found or ''}", flush=True
        )
        return found


def wait_for(host: Process, text: str) -> None:
    """Returns when a host has logged this."""
    end = time.monotonic() + MEETING
    while text not in host.log_file.read_text():
        assert time.monotonic() < end, host.log()
        time.sleep(0.1)


def test_faults_at_every_stage(tmp_path, request):
    single = worker("", tmp_path)
    try:
        single.wait_until_ready(300)
        expected = streamed(single, PROMPT, LENGTH)
    finally:
        single.close()
    rng, failures, counts = random.Random(7), [], collections.Counter()
    cases = list(itertools.product(STAGES, FAULTS, (0, 1)))
    end = time.monotonic() + 60 * request.config.getoption("--minutes")
    rng.shuffle(cases)
    for number, case in enumerate(itertools.cycle(cases)):
        if time.monotonic() > end:
            break
        stage, fault, victim = case
        folder = tmp_path / str(number)
        folder.mkdir()
        counts[stage, fault.name] += 1
        failures += [f"{stage} {fault.name} of host {victim}: {each}" for each in play(folder, *case, expected, rng)]
    print(f"{sum(counts.values())} lives of two hosts: {dict(counts)}")
    assert not failures
