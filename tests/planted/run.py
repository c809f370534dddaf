"""Which planted faults the default tier detects.

    python3 bootstrap.py python -m tests.planted.run [--part N/M] [NAMES]

For each fault, the files that should detect it run until a test fails. Exits with 1 if fewer than 95 % are detected.
`--part 3/10` takes every tenth fault from the third on; `--part auto/10` the part of today, so that ten days take all.

Faults with the same files share one pytest, which collects once and forks for each of them: this module is its plugin.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.planted.faults import faults_like
from tests.support import selection

ROOT = Path(__file__).resolve().parents[2]
NAMES, FOUND = "PLANTED_FAULTS", "PLANTED_FOUND"
"""Of the environment: names of faults, and the folder in which each has a file for the first test that failed."""
PLANTING_TESTS = " and ".join(
    f"not {name}" for name in ("fault_shows", "fault_is_seen", "fuzzer_sees", "a_test_sees", "are_noticed", "table")
)
SHARE = 0.95
SECONDS = 900
"""For the tests of one fault. A fault whose tests take longer counts as not detected."""


def pytest_configure(config: pytest.Config) -> None:
    """Run the named files as the default tier does."""
    selection.named_files = lambda config: set()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Run the tests once for each fault, in forks; if JAX runs, so that forks may hang, for the first fault only."""
    for name in os.environ[NAMES].split():
        found = Path(os.environ[FOUND]) / name
        finder = _Finder(Path(f"{found}.failed"))
        with warnings.catch_warnings(record=True) as jax_runs:
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of any thread, in the parent only
            child = os.fork()
        if jax_runs and not child:
            os._exit(0)
        if jax_runs or not child:
            signal.alarm(SECONDS)
            session.config.pluginmanager.register(finder)
            _plant(name)
            try:
                return (yield)
            finally:  # -x ends the loop by an exception
                if jax_runs:
                    finder.end(found)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) not in (0, 1):
            raise RuntimeError(f"fault {name}: pytest ended with {os.WEXITSTATUS(status)}")
        crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGALRM
        finder.end(found, f"ended by signal {os.WTERMSIG(status)}" if crashed else "")
    session.items.clear()
    return (yield)


class _Finder:
    """Writes down the first test that fails."""

    def __init__(self, failed: Path) -> None:
        self._failed = failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.exists():
            last = (report.longreprtext.splitlines() or [""])[-1]
            self._failed.write_text(f"{report.nodeid}: {last}", encoding="utf-8", errors="backslashreplace")

    def end(self, found: Path, otherwise: str = "") -> None:
        if not self._failed.exists():
            self._failed.write_text(otherwise)
        self._failed.rename(found)


def _plant(name: str) -> None:
    """Plants a fault in this process, which will compile what the fault may have changed."""
    import serving.engine.compiled_programs as kept

    sound = kept.source_digest
    kept.source_digest = lambda packages: f"fault {name} {sound(packages)}"
    faults_like(name)[name].plant(pytest.MonkeyPatch())


def detected_by(names: list[str], files: tuple[str, ...]) -> Iterator[str]:
    """Yields, for each fault, the first test that fails with it; an empty string if all pass or take too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.planted.run"]
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            environment = os.environ | {NAMES: " ".join(left), FOUND: folder}
            with (Path(folder) / "log").open("w") as out:
                options = ["-k", PLANTING_TESTS, *files]
                running = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=out, stderr=out)
            before = len(left)
            while left:
                found, over = Path(folder) / left[0], running.poll() is not None
                if found.exists():
                    yield found.read_text()
                    left.pop(0)
                elif over:
                    break
                else:
                    time.sleep(0.2)
            if running.wait() == -signal.SIGALRM and len(left) == before:  # without a fork
                yield ""
                left.pop(0)
            elif len(left) == before or running.returncode == pytest.ExitCode.INTERNAL_ERROR:
                log = (Path(folder) / "log").read_text()
                raise RuntimeError(f"pytest ended with {running.returncode}\n{log[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="1/1", help="N/M: every M-th fault from the N-th on; auto/M: by the day")
    options = parser.parse_args()
    first, step = options.part.split("/")
    begin = int(time.time() // 86400) % int(step) if first == "auto" else int(first) - 1
    faults = faults_like()
    names = options.names or list(faults)[begin :: int(step)]
    missed = []
    for files, group in itertools.groupby(names, key=lambda name: faults[name].files):
        alike = list(group)
        for name, by in zip(alike, detected_by(alike, files), strict=True):
            broken = "faults.py:" in by  # an error in the fault's own code says nothing of the tests
            print(f"{name}: {faults[name].text}: {'DOES NOT RUN: ' * broken}{by or 'NOT DETECTED'}", flush=True)
            if broken or not by:
                missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} faults detected; not {', '.join(missed) or 'one'}")
    return int(len(names) - len(missed) < SHARE * len(names))


if __name__ == "__main__":
    sys.exit(main())
