"""Which parameters stay float32 in a bfloat16 model, and what bfloat16 costs, per token."""

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.model import parameters
from tests.support.engines.prompt_stepper import TILE, PromptStepper


def test_what_steers_the_recurrence_stays_float32_in_bfloat16(case):
    exact = parameters(case.model)
    for path, param in parameters(case.load("bfloat16")).items():
        if path.endswith(("a_log", "dt_bias", "dt_proj.bias", ".d", "correction_bias", "recurrent_param")):
            assert param[...].dtype == jnp.float32, path
            assert np.array_equal(param[...], exact[path][...]), path
        elif "router" not in path:
            assert param[...].dtype == jnp.bfloat16, path


# Mean and largest Kullback-Leibler divergence of a token's distribution from float32's, as measured, in nats. Random
# weights have far broader distributions than trained ones: the figures tell regressions, not quality.
MEASURED = {
    "bamba": (2.3e-4, 7.6e-4),
    "falconh1": (1.8e-5, 3.5e-5),
    "granite-nope": (3.4e-4, 7.8e-4),
    "mamba2": (5.5e-4, 1.3e-3),
    "nemotronh": (1.6e-4, 4.1e-4),
    "zamba2": (1.2e-3, 3.2e-3),
}
LEEWAY = 1.5
CASES = {"test_divergence_of_bfloat16": tuple(MEASURED)}
BY_DEFAULT = ("mamba2", "nemotronh", "zamba2")


@pytest.mark.full
def test_divergence_of_bfloat16(case, request):
    if case.name not in BY_DEFAULT and not request.config.getoption("--slow"):
        pytest.skip("slow: run with --slow")
    stepper = PromptStepper(case.load("bfloat16"), case.prompts, dtype=jnp.bfloat16)
    stepper.reset()
    found = []
    # In pieces, so that the state is rounded to bfloat16 again and again.
    while unfinished := [row for row, prompt in enumerate(case.prompts) if stepper.length[row] < len(prompt)]:
        left = {row: len(case.prompts[row]) - stepper.length[row] for row in unfinished}
        _, written = stepper.prefill({row: min(count, TILE + 5) for row, count in left.items()}, every_tile=True)
        for (row, end), got in zip(written, stepper.log_probs(list(written.values())), strict=True):
            exact = case.full[row][end - 1]
            found.append(float((np.exp(exact) * (exact - got)).sum()))
    divergence = np.array([np.mean(found), np.max(found)])
    assert (divergence <= LEEWAY * np.array(MEASURED[case.name])).all(), divergence
