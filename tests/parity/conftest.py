"""Each fixture's model is loaded and its steps are compiled once, for all the tests of this folder."""

import pytest


def pytest_generate_tests(metafunc):
    """Tests of `case` run for every fixture, or for those that their module lists as `CASES`."""
    if "case" not in metafunc.fixturenames:
        return
    from golden.recipes import RECIPES

    tiers = {"default": (), "full": pytest.mark.full, "slow": pytest.mark.slow}
    params = [
        pytest.param(name, marks=tiers[recipe.steps] if "stepper" in metafunc.fixturenames else ())
        for name, recipe in RECIPES.items()
        if name in getattr(metafunc.module, "CASES", RECIPES)
    ]
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
