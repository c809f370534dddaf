"""An hour of mixed faults under load (`--minutes N` for less): nothing wrong, nothing hangs, nothing grows."""

import contextlib
import os
import random
import signal
import statistics
import threading
import time

import httpx
import pytest

from tests.support.split_faults import Fleet, Outcomes

pytestmark = pytest.mark.slow

MIB = 1 << 20
SAMPLES = 30
MOST_DESCRIPTORS, MOST_BYTES = 12, 48 * MIB
"""By which the last third of the time may have more than the second one, at its median."""


def held(pid: int) -> tuple[int, int]:
    """Descriptors, and bytes of resident memory."""
    with open(f"/proc/{pid}/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE")


class Faults:
    """One after the other, at random. The first prefill worker is the one that is killed; all others live on."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.rng, self.count = fleet, random.Random(seed), 0
        self.met = dict.fromkeys(("freeze", "kill", "hole", "drip", "flip", "send", "leave", "stranger"), 0)

    def one(self) -> None:
        name = self.rng.choice(list(self.met))
        self.met[name] += 1
        self.count += 1
        getattr(self, name, lambda: self.fleet.stages.arm(name))()

    def freeze(self) -> None:
        frozen = self.rng.choice(self.fleet.prefill).process
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.5, 6.0))
        frozen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        old = self.fleet.prefill[0]
        old.kill()
        self.fleet.prefill[0] = self.fleet.start("prefill", port=old.port)
        self.fleet.prefill[0].wait_until_ready()

    def send(self) -> None:
        """Half of a state, and the rest some time later."""
        self.fleet.stages.arm("send")
        if self.fleet.stages.reached("send", 10.0):
            time.sleep(self.rng.uniform(0.0, 5.0))
            self.fleet.stages.go("send")

    def leave(self) -> None:
        self.fleet.leave(20, seed=self.count)

    def stranger(self) -> None:
        ticket = {"id": "x", "worker": "http://127.0.0.1:1", "handoff": "full", "prompt_token_ids": [1], "position": 1}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(f"{self.fleet.decode.url}/split/expect", json=ticket, timeout=30)
            assert answer.status_code == 401


def test_mixed_faults_under_load(tmp_path, request):
    seconds = 60 * request.config.getoption("--minutes")
    with Fleet(tmp_path) as fleet:
        faults, over, outcomes = Faults(fleet, 5), threading.Event(), Outcomes()
        samples: dict[str, list[tuple[int, int]]] = {"router": [], "prefill": [], "decode": []}
        failures: list[BaseException] = []

        def guarded(work):
            def run() -> None:
                try:
                    while not over.is_set():
                        work()
                except BaseException as error:
                    failures.append(error)
                    over.set()

            return threading.Thread(target=run)

        def load() -> None:
            found = fleet.ask(24, 6, seed=1000 + outcomes.right + len(outcomes.errors))
            outcomes.right += found.right
            for name in ("errors", "wrong", "late"):
                getattr(outcomes, name).extend(getattr(found, name))
            assert not found.wrong
            assert not found.late

        def disturb() -> None:
            over.wait(faults.rng.uniform(0.5, 4.0))
            faults.one()

        threads = [guarded(load), guarded(disturb)]
        for thread in threads:
            thread.start()
        for _ in range(SAMPLES):
            if over.wait(seconds / SAMPLES):
                break
            for name, each in (("router", fleet.front), ("prefill", fleet.prefill[1]), ("decode", fleet.decode)):
                samples[name].append(held(each.process.pid))
        over.set()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        assert not failures, failures
        print(f"{outcomes.right} right, {len(outcomes.errors)} errors {sorted(set(outcomes.errors))[:5]}, {faults.met}")
        for stage in fleet.folder.glob("*.armed"):
            stage.unlink()
        fleet.assert_at_rest()
    grown = []
    for name, found in samples.items():
        third = len(found) // 3
        for what, most, at in (("descriptors", MOST_DESCRIPTORS, 0), ("bytes", MOST_BYTES, 1)):
            before, after = (
                statistics.median(each[at] for each in part) for part in (found[third : 2 * third], found[2 * third :])
            )
            print(f"{name}: {before:,.0f} and then {after:,.0f} {what}")
            if after - before > most:
                grown.append((name, what, before, after))
    assert not grown
    assert outcomes.right > 0.9 * (outcomes.right + len(outcomes.errors))
