"""What a configuration names, brought to this machine."""

from __future__ import annotations

from checkpoints.hub import local
from checkpoints.load import require_tokenizer
from checkpoints.tokenizer import Tokenizer
from serving.config import EngineConfig


def fetched(config: EngineConfig, *, weights: bool = True) -> EngineConfig:
    """The configuration with folders in place of a hub's names; downloads what is not there yet.

    Without `weights` the small files only, as for a model whose weights are made up (`load_format`).

    Raises:
        CheckpointError: the hub cannot be reached, or does not have it.
    """
    weights = weights and config.load_format != "dummy"
    model = local(config.model, revision=config.revision, download_dir=config.download_dir, weights=weights)
    tokenizer = config.tokenizer
    if tokenizer is not None:
        tokenizer = local(tokenizer, download_dir=config.download_dir, weights=False)
    return config.model_copy(update={"model": model, "tokenizer": tokenizer})


def tokenizer_of(config: EngineConfig) -> Tokenizer:
    """The tokenizer alone, to know of its absence before minutes are spent on loading weights.

    Raises:
        CheckpointError: there is none.
    """
    return require_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)
