"""Every planted fault of a split is seen."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import pytest

from serving.engine.steps.results import StateError
from serving.points.point import PointPrograms
from tests.serving.split.faults import FAULTS
from tests.support.fleets import split_pair

TABLE = Path(__file__).parents[3] / "docs" / "mutations.md"


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=[f"S{i}" for i in range(1, len(FAULTS) + 1)])
def test_fault_is_seen(fault):
    """The same test passes without the fault: it is one of this folder's."""
    programs = contextlib.nullcontext()
    if fault.traced:
        programs = mock.patch.object(split_pair, "points", return_value=PointPrograms(split_pair.points().arrangement))
    seen: BaseException | None = None
    with fault.plant(), programs:
        try:
            fault.seen_by(*fault.arguments)
        except (AssertionError, IndexError, StateError, ValueError, pytest.fail.Exception) as error:
            seen = error
    assert seen is not None


def test_the_table_has_them_all():
    row = r"^\| S(\d+) \| ([^|]+) \| ([^|]+) \| `test_\w+.py` `(\w+)` \|$"
    rows = re.findall(row, TABLE.read_text(), re.MULTILINE)
    assert [(int(number), text, lines, name) for number, text, lines, name in rows] == [
        (number, fault.text, fault.stands_for, fault.name) for number, fault in enumerate(FAULTS, 1)
    ]
