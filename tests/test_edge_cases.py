"""Tables of edge cases and of faults name tests that exist, and the first one has every number once."""

import ast
import functools
import re
from pathlib import Path

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
