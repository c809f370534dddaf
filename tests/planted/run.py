"""Which planted faults the default tier detects.

    python3 bootstrap.py python -m tests.planted.run [--part N/M] [NAMES]

For each fault, pytest runs the files that should detect it until a test fails. Exits with 1 if fewer than 95 % are
detected. `--part 3/10` takes every tenth fault from the third on; `--part auto/10` the part of today, so that ten days
take all.

The module is also the plugin that plants the fault in that run of pytest.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.planted.faults import faults_like
from tests.support import selection

ROOT = Path(__file__).resolve().parents[2]
NAME = "PLANTED_FAULT"
PLANTING_TESTS = " and ".join(
    f"not {name}" for name in ("fault_shows", "fault_is_seen", "fuzzer_sees", "a_test_sees", "mutations", "table")
)
SHARE = 0.95
SECONDS = 900
"""For the tests of one fault. A fault whose tests take longer counts as not detected."""


def pytest_configure(config: pytest.Config) -> None:
    """Run the named files as the default tier does, and compile what the fault may have changed."""
    selection.named_files = lambda config: set()
    import serving.engine.compiled_programs as kept

    kept.source_digest = lambda packages: f"fault {os.environ[NAME]}"


def pytest_collection_finish() -> None:
    faults_like(os.environ[NAME])[os.environ[NAME]].plant(pytest.MonkeyPatch())


def detected_by(name: str, files: tuple[str, ...]) -> str | None:
    """The first test that fails with a fault planted; None if all pass or they take too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "tests.planted.run"]
    command += ["--durations=0", "-k", PLANTING_TESTS, *files]
    environment = os.environ | {NAME: name}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode not in (0, 1):
        raise RuntimeError(f"fault {name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if done.returncode else None


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
    for name in names:
        by = detected_by(name, faults[name].files)
        print(f"{name}: {faults[name].text}: {by or 'NOT DETECTED'}", flush=True)
        if by is None:
            missed.append(name)
    print(f"{len(names) - len(missed)} of {len(names)} faults detected; not {', '.join(missed) or 'one'}")
    return int(len(names) - len(missed) < SHARE * len(names))


if __name__ == "__main__":
    sys.exit(main())
