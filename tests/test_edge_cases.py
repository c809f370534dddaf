"""Tables of edge cases, faults and planted faults: numbers once, tests that exist, and faults that can be planted."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.planted.faults import faults_like
from tests.serving.core.mutations.registry import ROWS

TESTS = Path(__file__).parent
EDGE_CASES, FAULTS = ((TESTS.parent / "docs" / page).read_text() for page in ("edge-cases.md", "faults.md"))
NUMBERS = [f"A{i}" for i in range(1, 53)] + [f"B{i}" for i in range(1, 27)]
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@functools.cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_number_is_covered_by_a_test() -> None:
    rows = re.findall(r"^\| ([AB]\d+) \| [^|]+ \| ([^|]+) \|$", EDGE_CASES, re.MULTILINE)
    assert [number for number, _ in rows] == NUMBERS
    for number, covered in rows:
        reasons = ("open: ", "cannot occur, because ")
        assert NAMED.search(covered) or covered.startswith(reasons), f"{number} is covered by nothing"


def test_every_named_test_exists() -> None:
    named = NAMED.findall(EDGE_CASES + FAULTS)
    assert len(named) > 100
    assert not [f"{path}::{name}" for path, name in named if name not in _functions(path)]


def test_every_fault_can_be_planted_and_its_files_exist() -> None:
    for fault in faults_like().values():
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
        assert all((TESTS.parent / path).exists() for path in fault.files), fault


def test_every_row_of_the_table_is_planted() -> None:
    assert ROWS.keys() == faults_like().keys()
