"""Mixed faults of a split under load for `--minutes N`: nothing wrong, nothing hangs, nothing leaks."""

import collections
import contextlib
import os
import random
import signal
import statistics
import threading
import time

import httpx
import pytest

from serving.split.seal import RECEIVER, Seal
from tests.support.fleets.split_faults import SECRET, LoadedFleet, Outcomes, at_rest

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
    """One fault after the other, at random. Each public method is a fault.

    `kill` ends the first prefill worker or the second decode worker; the other workers run from start to end.
    """

    def __init__(self, fleet: LoadedFleet, seed: int) -> None:
        self._fleet, self._rng = fleet, random.Random(seed)
        self.counts = dict.fromkeys((name for name in vars(Faults) if not name.startswith("_")), 0)

    def _one(self) -> str:
        """Waits for a moment, and then does one of the faults."""
        time.sleep(self._rng.uniform(0.5, 4.0))
        name = self._rng.choice(list(self.counts))
        self.counts[name] += 1
        getattr(self, name)()
        return name

    def freeze(self) -> None:
        """SIGSTOP of a worker that others can stand in for."""
        frozen = self._rng.choice([*self._fleet.prefill, *self._fleet.decode[1:]]).process
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.5, 6.0))
        frozen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._fleet.restart(self._rng.choice([self._fleet.prefill[0], *self._fleet.decode[1:]]))

    def leave(self) -> None:
        """Clients that close their connections."""
        self._fleet.leave(20, seed=self.counts["leave"])

    def hole(self) -> None:
        """A state of which nothing is sent."""
        self._fleet.stages.arm("hole")

    def drip(self) -> None:
        """A slow peer: a state that is sent at one byte a second."""
        self._fleet.stages.arm("drip")

    def flip(self) -> None:
        """A state with a wrong byte."""
        self._fleet.stages.arm("flip")

    def pause(self) -> None:
        """Half of a state, and the rest some time later."""
        self._fleet.stages.arm("send")
        if self._fleet.stages.reached("send", 10.0):
            time.sleep(self._rng.uniform(0.0, 5.0))
            self._fleet.stages.go("send")

    def forge(self) -> None:
        """Tickets without a seal, and with seals of another secret, receiver or body."""
        ticket = {"id": "x", "worker": "http://127.0.0.1:1", "handoff": "full", "prompt_token_ids": [1], "position": 1}
        place = f"{self._fleet.decode[0].url}/split/expect"
        right, other = Seal(SECRET), Seal("another secret")
        for headers in (
            {},
            other.headers("/split/expect", b"", self._name()),
            right.headers("/split/expect", b"another body", self._name()),
            right.headers("/split/expect", b"", "another receiver"),
        ):
            with contextlib.suppress(httpx.HTTPError):
                assert httpx.post(place, json=ticket, headers=headers, timeout=30).status_code == 401

    def replay(self) -> None:
        """A sealed message that is sent twice, and to another worker."""
        headers = Seal(SECRET).headers("/split/status", b"", self._name())
        with contextlib.suppress(httpx.HTTPError):
            assert (
                httpx.get(f"{self._fleet.decode[0].url}/split/status", headers=headers, timeout=30).status_code == 200
            )
            for each in (self._fleet.decode[0], self._fleet.prefill[1]):
                assert httpx.get(f"{each.url}/split/status", headers=headers, timeout=30).status_code == 401

    def _name(self) -> str:
        """By which the decode worker is addressed."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._fleet.decode[0].url}/split/status", timeout=30).headers[RECEIVER]
        return ""


def test_mixed_faults_under_load(tmp_path, request):
    seconds = 60 * request.config.getoption("--minutes")
    with LoadedFleet(tmp_path, unlike=True) as fleet:
        faults, over, outcomes = Faults(fleet, 5), threading.Event(), Outcomes()
        samples: dict[str, list[tuple[int, int]]] = {"router": [], "prefill": [], "decode": []}
        failures: list[BaseException] = []
        begin = time.monotonic()

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

        def disturb() -> None:
            name = faults._one()
            print(f"{time.monotonic() - begin:7.1f} s: {name}; {_line(outcomes)}", flush=True)

        threads = [guarded(load), guarded(disturb)]
        for thread in threads:
            thread.start()
        for _ in range(SAMPLES):
            if over.wait(seconds / SAMPLES):
                break
            for name, each in (("router", fleet.front), ("prefill", fleet.prefill[1]), ("decode", fleet.decode[0])):
                samples[name].append(held(each.process.pid))
        over.set()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        for stage in (*fleet.folder.glob("*.armed"), *fleet.folder.glob("*.reached")):
            stage.unlink()
        leaked = [each.url for each in fleet.workers if not at_rest(each, 120.0)]
        print(f"{time.monotonic() - begin:.0f} s: {_line(outcomes)}, {len(leaked)} workers with leaked places")
        print(f"faults: {faults.counts}; errors: {dict(collections.Counter(outcomes.errors))}")
        grown = list(_grown(samples))
        assert not failures, failures
        assert not outcomes.wrong
        assert not outcomes.late
        assert not leaked
        fleet.assert_at_rest()
    assert not grown
    assert outcomes.right > 0.9 * (outcomes.right + len(outcomes.errors))


def _line(outcomes: Outcomes) -> str:
    return (
        f"{outcomes.right} right, {len(outcomes.errors)} ended with an error, {len(outcomes.wrong)} wrong, "
        f"{len(outcomes.late)} hung"
    )


def _grown(samples: dict[str, list[tuple[int, int]]]):
    """Which process has more descriptors or memory than before."""
    for name, found in samples.items():
        third = len(found) // 3
        if not third:
            continue
        for what, most, at in (("descriptors", MOST_DESCRIPTORS, 0), ("bytes", MOST_BYTES, 1)):
            before, after = (
                statistics.median(each[at] for each in part) for part in (found[third : 2 * third], found[2 * third :])
            )
            print(f"{name}: {before:,.0f} and then {after:,.0f} {what}")
            if after - before > most:
                yield name, what, before, after
