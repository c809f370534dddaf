"""The table of edge cases has every number once, and names tests that exist."""

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
NUMBERS = [f"A{i}" for i in range(1, 53)] + [f"B{i}" for i in range(1, 27)]


@functools.cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_every_number_is_covered_by_tests_that_exist() -> None:
    table = (TESTS.parent / "docs" / "edge-cases.md").read_text()
    rows = re.findall(r"^\| ([AB]\d+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
    assert [number for number, _ in rows] == NUMBERS
    for number, covered in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", covered)
        assert tests or covered.startswith(("open: ", "cannot occur, because ")), f"{number} is covered by nothing"
        for path, name in tests:
            assert (TESTS / path).is_file(), f"{number}: there is no {path}"
            assert name in _functions(path), f"{number}: {path} has no {name}"
