"""The planted faults of every part: names, and the table in docs/mutations.md."""

import re
from pathlib import Path

import pytest

from tests.planted.faults import OTHERS, faults_like

ROOT = Path(__file__).resolve().parents[1]


def test_every_fault_can_be_planted_and_its_files_exist() -> None:
    for fault in faults_like().values():
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
        assert all((ROOT / path).exists() for path in fault.files), fault


def test_the_table_is_complete() -> None:
    rows = re.findall(r"^\| ([TCHKM]\d+) \| (.+) \|$", (ROOT / "docs/mutations.md").read_text(), re.MULTILINE)
    assert rows == [(fault.name, fault.text) for fault in OTHERS]
