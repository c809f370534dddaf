#!/usr/bin/env python3
"""What a change must pass: the lint, the README's own test command, then the full tier, random traffic, and programs
compiled for TPUs and GPUs.

Everything that is needed is installed, the compilers for TPUs and GPUs and the documentation's builder included. Tests
of kernels do not run again if nothing has changed since `passed.json` recorded their pass. A test that is skipped fails
the run unless its reason is in SKIPS, and so does one that takes more than TEST_SECONDS. Prints a table of tiers with
the commit; the environment's CI_RECORD names a file that gets the same table.
"""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README_COMMAND = re.search(r"^python3 bootstrap.py test.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
TIERS = {
    "lint": "python3 bootstrap.py lint",
    "default": README_COMMAND and README_COMMAND[0],
    "full": "python3 bootstrap.py test -n 3 --full --skip-recorded "
    '-m "(full or smoke) and not tier_1 and not fuzz and not tpu_compile and not gpu_compile"',
    "traffic": "python3 bootstrap.py test -n 2 --dist=worksteal --full --examples 2000 -m fuzz",
    "compiled": "python3 bootstrap.py test -n 3 --full --skip-recorded "
    '-m "(tpu_compile or gpu_compile) and not tier_1" tests/kernels_pallas tests/serving/capacity',
}
"""In the full tier a process waits for its children a seventh of the time: three keep two cores busy. Nearly all
traffic is in one file, whose cases share the compiled steps that tests store on disk. Programs for TPUs and GPUs come
last: they follow from the kernels and the compilers' versions, so they are what a slow machine leaves out first.
"""
LATEST = {"traffic": 66, "compiled": 66}
"""Minutes after which a tier is not begun. On a machine so slow, run it by hand."""
MINUTES = 85
"""After which the whole run is ended, with the stacks of all threads: CI itself ends at 90 and shows nothing."""
TEST_SECONDS = 600
"""After which a test's process is ended with the stacks of its threads. The longest takes a minute."""
EXTRAS = "test,plan-gpu,docs"
SKIPS = {
    "hardware": r"no GPU|Mosaic GPU|the processor has|no C\+\+ for|needs several devices",
    "packages of other extras": r"torch|transformers|extra (tunix|fleet|events|interop)|'ray|openai-agents",
    "programs": r"Chromium|kubectl|hadolint|openssl|curl",
    "cases that do not exist": r"power of two|the interpreter|groups only|states of 16 bits|does not run this",
    "slow cases": r"run with --slow",
    "recorded passes": r"since its pass in \.ci/passed\.json",
}
"""Reasons for which CI may skip a test."""
TEST_LIMIT = f"-o faulthandler_timeout={TEST_SECONDS} -o faulthandler_exit_on_timeout=true"
COLUMNS = "{:<8} {:>6} {:>7} {:>8} {:>8}  {}"


def main() -> int:
    os.environ |= {"MAMBA_JAX_EXTRAS": EXTRAS, "CI": "true"}  # tests of pauses allow for other users of the machine
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = [f"commit {commit or 'unknown'}", COLUMNS.format("tier", "tests", "skipped", "wall s", "CPU s", "result")]
    begin, failed = time.monotonic(), False
    for tier, command in TIERS.items():
        if (time.monotonic() - begin) / 60 > LATEST.get(tier, float("inf")):
            rows.append(COLUMNS.format(tier, 0, 0, 0, 0, f"not run: began after {LATEST[tier]} minutes"))
            continue
        row, failed = run(tier, command, begin + MINUTES * 60)
        rows.append(row)
        if failed:
            break
    table = "\n".join(rows)
    print(f"\n{table}", flush=True)
    if record := os.environ.get("CI_RECORD"):
        Path(record).write_text(table + "\n")
    return int(failed)


def run(tier: str, command: str, end: float) -> tuple[str, bool]:
    """Runs the command of a tier until this time; returns its row of the table, and whether it failed."""
    print(f"\n== {tier}: {command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begin, before = time.monotonic(), _cpu_seconds()
        code = _status(command, f"--junitxml={report} {TEST_LIMIT}", end - begin)
        wall, cpu = time.monotonic() - begin, _cpu_seconds() - before
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    reasons = Counter(reasons_of(cases))
    unknown = [reason for reason in reasons if not any(re.search(known, reason) for known in SKIPS.values())]
    for reason, count in reasons.items():
        print(f"{count} skipped{', which CI does not allow' if reason in unknown else ''}: {reason}", flush=True)
    results = {
        "took too long": code is None,
        f"exit status {code}": code,
        f"{len(unknown)} unknown skips": unknown,
    }
    result = next((text for text, holds in results.items() if holds), "passed")
    skipped = sum(reasons.values())
    return COLUMNS.format(tier, len(cases) - skipped, skipped, round(wall), round(cpu), result), result != "passed"


def _status(command: str, options: str, seconds: float) -> int | None:
    """Runs a command, with options of pytest; returns its exit status, or None if it had to be ended."""
    with subprocess.Popen(
        command, shell=True, cwd=ROOT, env=os.environ | {"PYTEST_ADDOPTS": options}, process_group=0
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)  # Python prints its threads' stacks
            time.sleep(10)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def reasons_of(cases: list[ElementTree.Element]) -> Iterator[str]:
    """Yields why each skipped test is skipped."""
    for case in cases:
        for skip in case.findall("skipped"):
            if skip.get("type") == "pytest.skip":
                message = skip.get("message", "")  # of a whole file, it is in the text
                yield (skip.text or "").split("Skipped: ")[-1][:-2] if message == "collection skipped" else message


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
