"""The planted faults of every part: names, and the table in docs/mutations.md."""

import re
from pathlib import Path

import pytest

from tests.planted.faults import CORE, DEVICE, OTHERS, SPLIT, Planted

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.name)
def test_what_a_fault_changes_exists(fault: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    assert all((ROOT / path).exists() for path in fault.files)


def test_files_that_should_detect_faults_exist() -> None:
    assert all((ROOT / path).exists() for path in (*CORE, *DEVICE, *SPLIT))


def test_the_table_is_complete() -> None:
    rows = re.findall(r"^\| ([TCHKM]\d+) \| (.+) \|$", (ROOT / "docs/mutations.md").read_text(), re.MULTILINE)
    assert rows == [(fault.name, fault.text) for fault in OTHERS]
