"""The table of faults names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())))


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_a_named_test_exists(file, name):
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
