#!/usr/bin/env python3
"""What a change must pass: the lint, the README's own test command, then the full tier and random traffic.

Everything that is needed is installed, the compilers for TPUs and GPUs and the documentation's builder included. A test
that is skipped fails the run unless its reason is in SKIPS. Prints a table of tiers with the commit; the environment's
CI_RECORD names a file that gets the same table.
"""

import os
import re
import resource
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
    "full": 'python3 bootstrap.py test -n 3 --full -m "(full or smoke) and not tier_1 and not fuzz"',
    "traffic": "python3 bootstrap.py test -n 2 --dist=worksteal --full --examples 2000 -m fuzz",
}
"""In the full tier a process waits for its children a seventh of the time: three keep two cores busy. Nearly all
traffic is in one file, whose cases share the compiled steps that tests store on disk.
"""
LATEST = {"traffic": 60}
"""Minutes after which a tier is not begun. CI has 90; on a machine so slow, run it by hand."""
EXTRAS = "test,plan-gpu,docs"
SKIPS = {
    "hardware": r"no GPU|Mosaic GPU|the processor has|no C\+\+ for|needs several devices",
    "packages of other extras": r"torch|transformers|extra (tunix|fleet|events|interop)|'ray|openai-agents",
    "programs": r"Chromium|kubectl|hadolint|openssl|curl",
    "cases that do not exist": r"power of two|the interpreter|groups only|states of 16 bits|does not run this",
    "slow cases": r"run with --slow",
}
"""Reasons for which CI may skip a test."""
COLUMNS = "{:<8} {:>6} {:>7} {:>8} {:>8}  {}"


def main() -> int:
    os.environ |= {"MAMBA_JAX_EXTRAS": EXTRAS}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    rows = [f"commit {commit or 'unknown'}", COLUMNS.format("tier", "tests", "skipped", "wall s", "CPU s", "result")]
    begin, failed = time.monotonic(), False
    for tier, command in TIERS.items():
        if (time.monotonic() - begin) / 60 > LATEST.get(tier, float("inf")):
            rows.append(COLUMNS.format(tier, 0, 0, 0, 0, f"not run: began after {LATEST[tier]} minutes"))
            continue
        row, failed = run(tier, command)
        rows.append(row)
        if failed:
            break
    table = "\n".join(rows)
    print(f"\n{table}", flush=True)
    if record := os.environ.get("CI_RECORD"):
        Path(record).write_text(table + "\n")
    return int(failed)


def run(tier: str, command: str) -> tuple[str, bool]:
    """Runs the command of a tier; returns its row of the table, and whether it failed."""
    print(f"\n== {tier}: {command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        begin, before = time.monotonic(), _cpu_seconds()
        code = subprocess.run(
            command, shell=True, cwd=ROOT, env=os.environ | {"PYTEST_ADDOPTS": f"--junitxml={report}"}
        ).returncode
        wall, cpu = time.monotonic() - begin, _cpu_seconds() - before
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    reasons = Counter(reasons_of(cases))
    unknown = [reason for reason in reasons if not any(re.search(known, reason) for known in SKIPS.values())]
    for reason, count in reasons.items():
        print(f"{count} skipped{', which CI does not allow' if reason in unknown else ''}: {reason}", flush=True)
    result = f"exit status {code}" if code else f"{len(unknown)} unknown skips" if unknown else "passed"
    skipped = sum(reasons.values())
    return COLUMNS.format(tier, len(cases) - skipped, skipped, round(wall), round(cpu), result), bool(code or unknown)


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
