"""Each fixture's model is loaded and its steps are compiled once, for all the tests of this folder."""

import pytest

from tests.support.golden_case import BY_STEPS, NAMES, Case
from tests.support.prompt_stepper import PromptStepper


def pytest_generate_tests(metafunc):
    """Tests of `case` run for every fixture, or for those that their module lists as `CASES`."""
    if "case" in metafunc.fixturenames:
        chosen = getattr(metafunc.module, "CASES", NAMES)
        # One worker does all tests of a fixture (with xdist's --dist loadgroup).
        params = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES if name in chosen]
        metafunc.parametrize("case", params, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "stepper" in getattr(item, "fixturenames", ()) and item.callspec.params["case"] not in BY_STEPS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def case(request):
    return Case(request.param)


@pytest.fixture(scope="session")
def compiled(case):
    return PromptStepper(case.model, case.prompts)


@pytest.fixture
def stepper(compiled):
    compiled.reset()
    return compiled
