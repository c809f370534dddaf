"""Adapters of the traces' models: random LoRA matrices, initial states, or both, large enough to change the tokens.

A trace names an adapter by its content, a number. The name in a request is drawn independently, so that a name often
gets new content while requests with its old content run.
"""

import functools
import random
from typing import Any

import numpy as np

from checkpoints.adapters.adapter import Adapter
from checkpoints.adapters.initial_state import InitialState
from mamba_jax.adapters import adaptable_layers
from mamba_jax.model import HybridModel
from serving.engine.requests.adapters import LoRARequest
from tests.support.models.random_models import random_layers

CONTENTS = ("lora", "lora", "lora", "state", "both", "state")
"""The kind of each content."""
NAMES = ("a", "b", "c")
RANKS = (4, 2, 3)
_SCALE = 0.5
"""Standard deviation of LoRA's changes, as a share of that of the weights, and of the values of an initial state."""


def draw_adapters(seed: int, requests: int) -> list[LoRARequest | None]:
    """The adapter of each request of a trace. The paths are numbers of contents."""
    rng = random.Random(f"adapters {seed}")
    usual = rng.sample(range(len(CONTENTS)), 3)
    return [
        None if rng.random() < 0.25 else LoRARequest(rng.choice(NAMES), 0, str(rng.choice(usual)))
        for _ in range(requests)
    ]


def read_contents(engine: Any, model: HybridModel) -> Any:
    """Makes an engine find contents where it would read directories. Returns the engine."""
    engine.adapters.read = lambda name, path: engine.adapters.checked(name, path, content(model, int(path)))
    return engine


@functools.cache
def content(model: HybridModel, number: int) -> Adapter:
    """The adapter of a number."""
    rng, kind = np.random.default_rng(number), CONTENTS[number]
    layers, state, rank = {}, None, RANKS[number % len(RANKS)]
    if kind != "state":
        for path, layer in adaptable_layers(model).items():
            weight = np.asarray(layer.weight[...])
            scale = _SCALE * weight.std() / np.sqrt(rank)
            outputs, inputs = int(np.prod(weight.shape[:-1])), weight.shape[-1]
            a, b = rng.standard_normal((rank, inputs)), scale * rng.standard_normal((outputs, rank))
            layers[path] = (a.astype(np.float32), b.astype(np.float32))
    if kind != "lora":
        state = InitialState(random_layers(model.config, number, _SCALE), f"state {number}")
    return Adapter(layers, rank if layers else 0, f"content {number}", None, state)
