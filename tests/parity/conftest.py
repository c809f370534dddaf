"""Each fixture's model is loaded and its steps are compiled once, for all the tests of this folder."""

import pytest


def pytest_generate_tests(metafunc):
    """Tests of `case` run for every fixture, or for those that `CASES` of their module has under their names."""
    if "case" not in metafunc.fixturenames:
        return
    from golden.recipes import RECIPES

    full, slow = pytest.mark.full, pytest.mark.slow
    cases = getattr(metafunc.module, "CASES", {}).get(metafunc.function.__name__)
    if "stepper" in metafunc.fixturenames:
        tiers = {"default": (), "full": full, "slow": slow}
    else:  # whole sequences: by default of the models whose steps the full tier compiles
        tiers = {"default": (), "full": (), "slow": full if cases is None else ()}
    # First those that the default tier compiles for other tests.
    recipes = sorted(RECIPES.items(), key=lambda item: item[1].steps != "default")
    params = [pytest.param(name, marks=tiers[recipe.steps]) for name, recipe in recipes if name in (cases or RECIPES)]
    metafunc.parametrize("case", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request):
    from tests.support.models.golden_case import Case

    return Case(request.param)


@pytest.fixture(scope="session")
def compiled(case):
    from tests.support.engines.prompt_stepper import PromptStepper

    return PromptStepper(case.model, case.prompts)


@pytest.fixture
def stepper(compiled):
    compiled.reset()
    return compiled
