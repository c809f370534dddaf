"""What tells one model's states from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from mamba_jax.config import HybridConfig

_SAMPLES = 16  # values of each weight that go into the model's hash


def model_digest(model: nnx.Module, config: HybridConfig) -> str:
    """A hash of a model: its config, every weight's name and shape, and some values of each.

    Sampling reads a few numbers of each weight, not gigabytes: it tells checkpoints and fine-tunes apart, and does not
    prove that no weight differs anywhere. Weights are compared as float32, whatever they are stored as.
    """
    found = hashlib.sha256(repr(config).encode())
    for path, leaf in sorted(_weights(model)):
        flat = leaf.reshape(-1)
        values = np.asarray(flat[:: max(1, flat.size // _SAMPLES)][:_SAMPLES]).astype(np.float32)
        found.update(f"{path}{tuple(leaf.shape)}".encode())
        found.update(values.tobytes())
    return found.hexdigest()[:32]


def _weights(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        yield ".".join(map(str, path)), leaf[...]
