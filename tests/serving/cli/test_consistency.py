"""Serving and training find the engine's tokens equally likely, and it would show if they did not."""

from functools import partial

import numpy as np
import pytest

from checkpoints.load import load_model
from checkpoints.random import write_random
from mamba_jax.model import parameters
from mamba_jax.programs import StepPrograms
from serving.cli.evaluation import consistency
from serving.cli.evaluation.consistency import ARRANGEMENTS, OTHER_SHAPES, Agreement, agreements
from tests.support.engines import QUICK_COMPILE
from tests.support.tiny_configs import TRAINABLE

FLAGS = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "tile_size": 16,
    "state_block_size": 32,
    "num_slots": 40,
    "num_pages": 80,
}


def test_the_estimate_by_hand():
    served, trained = np.log([0.5, 0.25]), np.log([0.25, 0.25])
    found = Agreement.of("by hand", served, trained)
    np.testing.assert_allclose((found.kl, found.largest), ((0.5 - 1 + np.log(2)) / 2, np.log(2)))


@pytest.mark.full
@pytest.mark.parametrize("name", ["drafts (MTP, K=3), hits"])
def test_serving_and_training_agree(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "serving.engine.assembly.build.StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE)
    )
    monkeypatch.setattr(consistency, "ARRANGEMENTS", {name: ARRANGEMENTS[name]})
    directory = write_random(tmp_path, TRAINABLE)
    model = load_model(directory, progress=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 40 for j in range(40)]} for i in range(4)]
    served, other = agreements(str(directory), model, prompts, max_tokens=12, flags=FLAGS)
    assert (served.arrangement, other.arrangement) == (name, OTHER_SHAPES)
    assert served.tokens == 2 * 4 * 12
    assert served.cached_tokens >= 4 * 32
    assert abs(served.kl) < 1e-8
    assert abs(other.kl) < 1e-8
    norm = parameters(model)["final_norm.weight"]
    norm.set_value(1.01 * norm.get_value())  # a model that is another one by a little
    assert agreements(str(directory), model, prompts, max_tokens=12, flags=FLAGS)[0].kl > 1e-8
