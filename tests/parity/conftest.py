"""Each fixture's model is loaded and its steps are compiled once, for all the tests of this folder."""

import pytest


def pytest_generate_tests(metafunc):
    """Tests of `case` run for every fixture, or for those that their module lists as `CASES`."""
    if "case" not in metafunc.fixturenames:
        return
    from tests.support.golden_case import BY_STEPS, BY_STEPS_BY_DEFAULT, NAMES

    def marks(name):
        if "stepper" not in metafunc.fixturenames or name in BY_STEPS_BY_DEFAULT:
            return ()
        return pytest.mark.full if name in BY_STEPS else pytest.mark.slow

    names = [name for name in NAMES if name in getattr(metafunc.module, "CASES", NAMES)]
    params = [pytest.param(name, marks=marks(name)) for name in names]
    metafunc.parametrize("case", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request):
    from tests.support.golden_case import Case

    return Case(request.param)


@pytest.fixture(scope="session")
def compiled(case):
    from tests.support.prompt_stepper import PromptStepper

    return PromptStepper(case.model, case.prompts)


@pytest.fixture
def stepper(compiled):
    compiled.reset()
    return compiled
