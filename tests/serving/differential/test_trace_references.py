"""What traces are judged by: one request at a time through the engine is what the model says, without any store."""

import jax
import numpy as np
import pytest
from flax import nnx

from mamba_jax.adapters import adaptable_layers
from serving.engine.requests.adapters import LoRARequest
from tests.support.engines.shared_engines import PROGRAMS, SMALLEST, TOLERANCE, SharedEngines, engines_of
from tests.support.models.adapter_contents import CONTENTS, content
from tests.support.selection import some_slow


@pytest.mark.smoke
@pytest.mark.parametrize("name", some_slow(PROGRAMS, *(PROGRAMS.keys() - {"nemotronh", "kimi", "selective"})))
def test_the_reference_is_what_the_model_says(name: str) -> None:
    """One at a time through the engine is the same as the whole sequence at once, without any store."""
    on = engines_of(name)
    for prompt in [(5,), tuple(range(3, 20)), tuple(range(50, 90))]:
        (line,) = on.alone(prompt)
        said = on.whole([*prompt, *line.tokens])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(said, np.array(line.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(line.logprobs, chosen, atol=TOLERANCE)
        assert (said.max(axis=1) - chosen < TOLERANCE).all()
    # An early token still matters late: were the state forgotten quickly, these tests would see little.
    changed = np.abs(on.whole([7, *range(60)])[-1] - on.whole([8, *range(60)])[-1]).max()
    assert changed > 10 * TOLERANCE


@pytest.mark.full
def test_the_references_are_those_of_the_merged_weights() -> None:
    """One at a time through the engine is the same as a model with the adapter in its weights, without any store."""
    on, prompt = engines_of(f"{SMALLEST}, adapters"), tuple(range(3, 20))
    lines = [on.alone(prompt, adapter=LoRARequest("x", 0, str(number)))[0] for number in range(len(CONTENTS))]
    assert len({tuple(line.tokens) for line in (*lines, *on.alone(prompt))}) == 1 + len(CONTENTS)
    for number, line in enumerate(lines):
        if CONTENTS[number] != "lora":
            continue
        said = _merged(on, number, [*prompt, *line.tokens])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(said, np.array(line.tokens)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(line.logprobs, chosen, atol=TOLERANCE)


def _merged(on: SharedEngines, number: int, tokens: list[int]) -> np.ndarray:
    model = nnx.clone(on.model)
    for path, layer in adaptable_layers(model).items():
        a, b = content(on.model, number).layers[path]
        layer.weight[...] = layer.weight[...] + (b @ a).reshape(layer.weight.shape)
    return np.asarray(jax.nn.log_softmax(model(np.array([tokens]), np.array([len(tokens)]))))[0]
