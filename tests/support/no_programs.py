"""Step programs that compute nothing: everything around the model runs, and nothing is compiled."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np


class NoPrograms:
    """They emit one token for ever and leave the store as it is."""

    compilations = 0

    def change_rows(self, rows, batch):
        return rows

    def decode(self, store, rows, batch):
        emitted = jnp.asarray(np.where(np.asarray(batch.sample), 5, -1)[:, None].astype(np.int32))
        finite = jnp.ones(len(emitted), bool)
        return store, rows, SimpleNamespace(tokens=emitted, finite=finite, num_drafts=None, prompt_logprobs=None)

    prefill = decode
