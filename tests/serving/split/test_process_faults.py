"""Faults of real processes on loopback: every request ends in time, with the right tokens or a clear error, and no
place stays taken. One by one, and mixed under load for `--minutes N`."""

import collections
import contextlib
import itertools
import os
import random
import signal
import statistics
import threading
import time

import pytest

from tests.support.fleets.split_faults import AUTH, LoadedFleet, Outcomes

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with contextlib.closing(LoadedFleet(tmp_path_factory.mktemp("faults"))) as fleet:
        fleet.begin()
        yield fleet


def test_a_frozen_prefill_worker(fleet):
    """SIGSTOP: its connections stand, and nothing comes. What waits for it goes to the other one."""
    frozen = fleet.prefill[0].process
    timer = threading.Timer(0.3, frozen.send_signal, (signal.SIGSTOP,))
    timer.start()
    try:
        assert fleet.ask(30, 10, seed=2) == Outcomes(right=30)
    finally:
        timer.join()
        frozen.send_signal(signal.SIGCONT)
    fleet.assert_at_rest()


SEEDS = itertools.count(100)


@pytest.mark.parametrize("fault", ["hole", "drip", "flip"])
def test_states_that_do_not_come_as_they_should(fleet, fault):
    """Nothing, a byte a second, another byte: the decode worker computes the prompt itself."""
    before = fleet.decode[0].get("/split/status", AUTH)["failed"]
    for _ in range(2):
        fleet.stages.arm(fault)
        # For some seconds after a timeout, a decode worker does not ask that worker for states.
        for seed in itertools.islice(SEEDS, 60):
            assert fleet.ask(4, 4, seed=seed) == Outcomes(right=4)
            if fleet.stages.reached(fault, 1.0):
                break
        else:
            pytest.fail("no state was asked for")
        fleet.stages.go(fault)
    assert fleet.decode[0].get("/split/status", AUTH)["failed"] >= before + 2
    fleet.assert_at_rest()


SAMPLES = 30
MOST_DESCRIPTORS, MOST_BYTES = 12, 48 << 20
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

    def damage(self) -> None:
        """A state of which nothing is sent, or a byte a second, or a wrong byte."""
        self._fleet.stages.arm(self._rng.choice(["hole", "drip", "flip"]))

    def pause(self) -> None:
        """Half of a state, and the rest some time later."""
        self._fleet.stages.arm("send")
        if self._fleet.stages.reached("send", 10.0):
            time.sleep(self._rng.uniform(0.0, 5.0))
            self._fleet.stages.go("send")


@pytest.mark.slow
def test_mixed_faults_under_load(tmp_path, request):
    seconds = 60 * request.config.getoption("--minutes")
    with contextlib.closing(LoadedFleet(tmp_path, unlike=True)) as fleet:
        fleet.begin()
        faults, over, outcomes = Faults(fleet, 5), threading.Event(), Outcomes()
        samples: dict[str, list[tuple[int, int]]] = {"router": [], "prefill": [], "decode": []}
        failures: list[BaseException] = []
        begin = time.monotonic()

        def repeat(work) -> None:
            try:
                while not over.is_set():
                    work()
            except BaseException as error:
                failures.append(error)
                over.set()

        def load() -> None:
            fleet.ask(24, 6, seed=1000 + outcomes.right + len(outcomes.errors), outcomes=outcomes)

        def disturb() -> None:
            name = faults._one()
            print(f"{time.monotonic() - begin:7.1f} s: {name}; {outcomes.line}", flush=True)

        threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in (load, disturb)]
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
        leaked = [each.url for each in fleet.workers if not each.idle(120.0, AUTH)]
        print(f"{time.monotonic() - begin:.0f} s: {outcomes.line}, {len(leaked)} workers with leaked places")
        print(f"faults: {faults.counts}; errors: {dict(collections.Counter(outcomes.errors))}")
        grown = list(_grown(samples))
        assert (failures, outcomes.wrong, outcomes.late, leaked) == ([], [], [], [])
        fleet.assert_at_rest()
    assert not grown
    assert outcomes.right > 0.9 * (outcomes.right + len(outcomes.errors))


def _grown(samples: dict[str, list[tuple[int, int]]]):
    """Which process has more descriptors or memory than before."""
    for name, found in samples.items():
        third = len(found) // 3
        if not third:
            continue
        for what, most, at in (("descriptors", MOST_DESCRIPTORS, 0), ("bytes", MOST_BYTES, 1)):
            parts = found[third : 2 * third], found[2 * third :]
            before, after = (statistics.median(each[at] for each in part) for part in parts)
            print(f"{name}: {before:,.0f} and then {after:,.0f} {what}")
            if after - before > most:
                yield name, what, before, after
