"""Downloads the model and tokenizer that a configuration names."""

from __future__ import annotations

from checkpoints.hub import local
from checkpoints.tokenizer import Tokenizer, require_tokenizer
from serving.config import EngineConfig


def fetched(config: EngineConfig, *, weights: bool = True) -> EngineConfig:
    """Downloads missing files and returns the configuration with directories in place of names on a hub.

    Without `weights`, or for dummy weights (`load_format`), downloads only the small files.

    Raises:
        CheckpointError: the hub cannot be reached, or has no such model.
    """
    weights = weights and config.load_format != "dummy"
    model = local(config.model, revision=config.revision, download_dir=config.download_dir, weights=weights)
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = local(tokenizer, download_dir=config.download_dir, weights=False)
    drafter = config.speculative_model
    if drafter is not None:
        drafter = local(drafter, download_dir=config.download_dir, weights=weights)
    return config.model_copy(update={"model": model, "tokenizer": tokenizer, "speculative_model": drafter})


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """Loads only the tokenizer, so that a missing one is reported before the weights are loaded.

    Raises:
        CheckpointError: the model has no tokenizer.
    """
    return require_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)
