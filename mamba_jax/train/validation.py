"""The loss of held-out sequences, without drafts."""

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike
from jaxtyping import Int32

from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.train.config import DraftSettings
from mamba_jax.train.data import DocumentBounds, TokenStream
from mamba_jax.train.loss import Parameters, training_loss


def validation_sequences(
    streams: Mapping[str, TokenStream], *, length: int, limit: int, separate: bool = False
) -> Int32[np.ndarray, "windows length"]:
    """Sequences that do not overlap, spread evenly over all streams.

    Args:
        streams: the validation data by source.
        length: tokens in a sequence.
        limit: maximum number of sequences.
        separate: mark the first token of each document.
    Raises:
        ModelConfigError: no stream is as long as a sequence.
    """
    places = [(name, start) for name in sorted(streams) for start in streams[name].windows(length, 0)]
    if not places:
        raise ModelConfigError(
            f"the validation data has no sequence of {length} tokens: give more with --validation, use a shorter"
            " sequence_length, or set data.held_out to 0 to train without it"
        )
    chosen = np.linspace(0, len(places) - 1, min(limit, len(places))).round().astype(int)
    return np.stack([streams[places[i][0]].sequence(places[i][1], length, separate=separate) for i in chosen])


class Validation:
    """Computes the mean loss of the next token over the same sequences each time.

    Args:
        sequences: one token longer than what the model is run over.
        batch_size: maximum number of sequences that are computed together.
        config: the model's configuration.
        dtype: dtype of the products.
        sharding: divides the sequences of a batch among `devices` devices.
    Raises:
        ModelConfigError: there are fewer sequences than devices.
    """

    def __init__(
        self,
        sequences: Int32[np.ndarray, "windows length"],
        *,
        batch_size: int,
        config: HybridConfig,
        dtype: DTypeLike,
        sharding: Sharding,
        devices: int,
    ) -> None:
        if len(sequences) < devices:
            raise ModelConfigError(
                f"the validation data has {len(sequences)} sequences: at least one for each of {devices} devices"
                " is expected"
            )
        # The last batch may be smaller; what its devices cannot share equally is left out.
        batches = [sequences[i : i + batch_size] for i in range(0, len(sequences), batch_size)]
        cut = [batch[: len(batch) // devices * devices] for batch in batches]
        self._batches, self._sharding = [batch for batch in cut if len(batch)], sharding
        no_drafts = DraftSettings(depth_weights=())
        self._loss = jax.jit(
            functools.partial(training_loss, config=config, drafts=no_drafts, dtype=dtype), static_argnames="bounds"
        )

    def loss(self, values: Parameters) -> float:
        """Returns the mean over all tokens, in nats."""
        total, count = 0.0, 0
        for batch in self._batches:
            targets = int((batch[:, 1:] >= 0).sum())
            tokens = jax.device_put(batch, self._sharding)
            total += targets * float(self._loss(values, tokens, bounds=DocumentBounds.of(batch[None]))[0])
            count += targets
        return total / count
