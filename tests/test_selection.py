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
def selected(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each run would import all plugins anew
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_examples=EXAMPLES, test_kernel=KERNEL)

    def run(*arguments):
        result = pytester.runpytest_inprocess("--collect-only", "-q", *arguments)
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


def test_files_without_a_selected_test_are_not_imported(pytestconfig, monkeypatch):
    for options, file, expected in [
        ({"keyword": "test_eviction"}, "serving/core/test_eviction.py", None),
        ({"keyword": "test_eviction"}, "serving/core/test_limits.py", True),
        ({"keyword": "Eviction"}, "serving/core/conftest.py", None),
        # An inherited test.
        ({"keyword": "test_equal_keys"}, "kernels_pallas/test_recurrence_scan.py", None),
        ({"keyword": "test_equal_keys"}, "kernels_pallas/test_recurrence_update.py", True),
        # Not in any name: perhaps the value of a parameter.
        ({"keyword": "bfloat16states"}, "serving/core/test_hits.py", None),
        ({"keyword": "test_eviction or test_hits"}, "serving/core/test_limits.py", None),
        ({}, "serving/core/test_hits.py", None),
        # Marked `full`; and marked so, with tests marked `smoke`.
        ({}, "serving/capacity/test_compiled_replay.py", True),
        ({"full": True}, "serving/capacity/test_compiled_replay.py", None),
        ({}, "kernels_pallas/test_recurrence_replay.py", None),
        ({"full": True, "markexpr": "(full or smoke) and not fuzz"}, "kernels_pallas/test_recurrence_replay.py", None),
        ({"full": True, "markexpr": "(full or smoke) and not tier_1 and not fuzz"}, "serving/core/test_hits.py", True),
        ({"full": True, "markexpr": "fuzz"}, "kernels_pallas/test_recurrence_replay.py", True),
        ({"full": True, "markexpr": "fuzz"}, "serving/core/test_fuzz.py", None),
        ({"full": True, "markexpr": "full or gpu"}, "serving/core/test_hits.py", None),
    ]:
        for name, value in ({"keyword": "", "full": False, "markexpr": "", "slow": False} | options).items():
            monkeypatch.setattr(pytestconfig.option, name, value)
        assert selection.ignored(selection.TESTS / file, pytestconfig) is expected, (options, file)
