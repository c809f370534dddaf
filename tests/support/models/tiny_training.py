"""A model and a text small enough to train in seconds."""

import numpy as np

from mamba_jax.families import config_from_hf
from mamba_jax.train.config import DraftSettings, OptimizerSettings, TrainConfig
from mamba_jax.train.data import Batches, TokenStream
from tests.support.models.tiny_configs import TRAINABLE

CONFIG = config_from_hf(TRAINABLE)
LENGTH, BATCH = 24, 8
NO_DRAFTS = DraftSettings(depth_weights=())


def settings(**changes):
    """A short run."""
    base = {
        "optimizer": OptimizerSettings(name="muon", learning_rate=0.02, warmup_steps=2),
        "drafts": DraftSettings(depth_weights=(0.3, 0.2)), "steps": 12, "batch_size": BATCH, "sequence_length": LENGTH,
        "log_every": 1, "save_every": 100,
    }  # fmt: skip
    return TrainConfig(**(base | changes))


def batches(seed=0):
    """Text that can be learnt: each document counts up from somewhere, in steps of one or two."""
    rng = np.random.default_rng(3)
    documents = [(rng.integers(40) + np.arange(60) * rng.integers(1, 3)) % 40 for _ in range(30)]
    streams = {"counting": TokenStream.of(documents), "again": TokenStream.of(documents[:9], aligned=True)}
    return Batches(streams, {"counting": 3, "again": 1}, batch_size=BATCH, length=LENGTH + 1, seed=seed)
