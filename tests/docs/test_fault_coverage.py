"""How many of the planted faults in docs/mutations.md the default tier detects, by the test that detects each."""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.core.test_fuzz import SHARDS

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "mutations.md"
FOLDERS = [f"tests/serving/{name}" for name in ("core", "differential", "points", "split", "tiers")]
SCHEDULES = 400 // SHARDS
"""Of the seeds 0, 1, ... so many run by default."""
TRAFFIC = {
    "test_device_mutations.py": "test_sound_programs_pass",
    "test_draft_mutations.py": "test_sound_programs_pass",
    "test_structured_with_plain.py": "test_each_says_what_it_says_alone",
    "test_traces_with_adapters.py": "test_a_few_traces",
    "test_traces_invariant.py": "test_bits_of_each_recurrence",
}
"""Where a file plants its faults under one piece of traffic: the test that runs this traffic without a fault. It fails
where one of the faults is real."""


def faults() -> Iterator[tuple[str, str]]:
    """Each fault's number, and what detects it: "schedule N" or "test_file.py test_name"."""
    file = ""
    for line in TABLE.read_text().splitlines():
        if row := re.match(r"\| ([A-Z]?\d+) \|.*\| ([^|]*) \|$", line):
            number, last = row.groups()
            if schedule := re.fullmatch(r"fuzzer, (schedule \d+)", last):
                yield number, schedule[1]
            elif test := re.fullmatch(r"`(test_\w+\.py)` `(test_\w+)`", last):
                yield number, f"{test[1]} {test[2]}"
            else:
                yield number, f"{file} {TRAFFIC[file]}"
        elif named := re.search(r"`(test_\w+\.py)`", line):
            file = named[1]


def cases(*options: str) -> dict[str, int]:
    """How many cases of "test_file.py test_name" are selected."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, *FOLDERS]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr
    counts: dict[str, int] = defaultdict(int)
    for file, test in re.findall(r"^\S*?(test_\w+\.py)::(?:\w+::)*(test_\w+)", found.stdout, re.MULTILINE):
        counts[f"{file} {test}"] += 1
    return counts


def test_the_default_tier_detects_most_planted_faults():
    default, full = cases(), cases("--full")
    detected, missed = [], []
    for number, by in faults():
        if by.startswith("schedule"):
            found = int(by.split()[1]) < SCHEDULES
        else:
            assert full[by], f"fault {number}: there is no {by}"
            found = default[by] == full[by]  # which of its cases detects the fault is not listed
        (detected if found else missed).append(number)
    total = len(detected) + len(missed)
    print(f"{len(detected)} of {total} faults; not {', '.join(missed)}")
    assert len(detected) >= 0.9 * total, missed
