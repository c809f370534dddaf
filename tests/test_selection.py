"""Which tests run by default, with --full and with --slow."""

import pytest

from tests.support import selection

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support.selection import ignored, select

def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")
    parser.addoption("--slow", action="store_true")

def pytest_configure(config):
    for name in ("tier_1", "full", "slow", "smoke"):
        config.addinivalue_line("markers", name)

def pytest_collection_modifyitems(config, items):
    select(config, items)
"""
EXAMPLES = """
import pytest
slow = pytest.mark.slow

def test_plain():
    pass

@pytest.mark.full
def test_thorough():
    pass

@slow
def test_of_minutes():
    pass

@pytest.mark.smoke
@pytest.mark.parametrize("n", [pytest.param(0, marks=slow), 1, 2])
def test_cases(n):
    pass

@pytest.mark.smoke("kind")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["a", "b"])
def test_kinds(kind, n):
    pass
"""
KERNEL = """
import pytest
pytestmark = pytest.mark.full

class Operation:
    def test_in_detail(self):
        pass

    @pytest.mark.smoke
    @pytest.mark.parametrize("n", [1, 2])
    def test_sizes(self, n):
        pass

class TestOne(Operation):
    pass

class TestTwo(Operation):
    pass
"""


@pytest.fixture
def selected(pytester):
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_examples=EXAMPLES, test_kernel=KERNEL)

    def run(*arguments):
        result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:jaxtyping", *arguments)
        return sorted(line.split("::", 1)[1] for line in result.outlines if "::" in line)

    return run


def test_default_tier(selected):
    assert selected() == [
        "TestOne::test_sizes[1]",
        "TestTwo::test_sizes[1]",
        "test_cases[1]",
        "test_kinds[a-1]",
        "test_kinds[b-1]",
        "test_plain",
    ]


def test_full_tier_has_all_but_the_slow_tests(selected):
    everything = selected("--slow")
    assert len(everything) == 16
    assert selected("--full") == [name for name in everything if name not in ("test_cases[0]", "test_of_minutes")]
    assert selected("--full", "-m", "not tier_1") == sorted({*selected("--full")} - {*selected()})


def test_a_file_on_the_command_line_runs_as_with_full(selected):
    assert selected("test_kernel.py") == selected("--full", "test_kernel.py")
    assert "test_thorough" not in selected("test_kernel.py", ".")


def test_a_keyword_spares_the_import_of_files_that_cannot_match(pytestconfig, monkeypatch):
    tests = selection.TESTS
    for keyword, file, expected in [
        ("test_eviction", "serving/core/test_eviction.py", None),
        ("test_eviction", "serving/core/test_limits.py", True),
        ("Eviction", "serving/core/conftest.py", None),
        # An inherited test.
        ("test_equal_keys", "kernels_pallas/test_recurrence_scan.py", None),
        ("test_equal_keys", "kernels_pallas/test_recurrence_update.py", True),
        # Not in any name: perhaps the value of a parameter.
        ("bfloat16states", "serving/core/test_hits.py", None),
        ("test_eviction or test_hits", "serving/core/test_limits.py", None),
        ("", "serving/core/test_hits.py", None),
    ]:
        monkeypatch.setattr(pytestconfig.option, "keyword", keyword)
        assert selection.ignored(tests / file, pytestconfig) is expected, (keyword, file)


def test_a_file_of_the_full_tier_is_imported_only_with_it(pytestconfig, monkeypatch):
    monkeypatch.setattr(pytestconfig.option, "keyword", "")
    for full, marks, file, expected in [
        (False, "", "serving/capacity/test_compiled_replay.py", True),
        (True, "", "serving/capacity/test_compiled_replay.py", None),
        # Marked `full`, with tests marked `smoke`.
        (False, "", "kernels_pallas/test_recurrence_replay.py", None),
        (True, "(full or smoke) and not fuzz", "kernels_pallas/test_recurrence_replay.py", None),
        (True, "(full or smoke) and not tier_1 and not fuzz", "serving/core/test_hits.py", True),
        (True, "fuzz", "kernels_pallas/test_recurrence_replay.py", True),
        (True, "fuzz", "serving/core/test_fuzz.py", None),
        (True, "full or gpu", "serving/core/test_hits.py", None),
    ]:
        monkeypatch.setattr(pytestconfig.option, "full", full)
        monkeypatch.setattr(pytestconfig.option, "markexpr", marks)
        monkeypatch.setattr(pytestconfig.option, "slow", False)
        assert selection.ignored(selection.TESTS / file, pytestconfig) is expected, (full, file)
