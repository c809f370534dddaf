"""Which implementations a model's operations get on a platform, found by tracing steps: no program is compiled."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.dispatch import KernelChoice
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.config import HybridConfig
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepBatch, StepPrograms
from mamba_jax.rows import init_rows
from mamba_jax.store import StoreShape, init_store

ROWS, TOKENS, TILE = 8, 2048, 128


def kernel_report(
    config: HybridConfig, platform: str, *, dtype: DTypeLike = jnp.bfloat16
) -> Iterator[tuple[str, str, str, str]]:
    """Yields a phase, an operation, the name of an implementation, and why it is not one that comes before.

    Decode is that of 8 rows without drafts, prefill that of 2,048 tokens, undivided. A kernel is lowered for the
    platform by itself, so that one that cannot run is known; whether a device's compiler takes it is not.
    """
    # One layer of each kind; shared blocks in both of their forms.
    pattern = "".join(dict.fromkeys(config.pattern)).replace("Z", "ZZ")
    config = dataclasses.replace(config, pattern=pattern, mtp_pattern="", vocab_size=min(config.vocab_size, 1024))
    sizes: dict[str, Any] = {"num_slots": 2 * ROWS + 1, "page_size": 128 if platform == "tpu" else 64, "dtype": dtype}
    store = jax.eval_shape(partial(init_store, StoreShape.of(config), num_pages=1024, **sizes))
    rows = jax.eval_shape(partial(init_rows, config, max_num_seqs=ROWS))
    batches: dict[str, StepBatch] = {
        "decode": DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64),
        "prefill": PrefillBatch.empty(
            tokens=TOKENS, rows=2, tiles=TOKENS // TILE + 2, pages_per_row=64, tile_size=TILE
        ),
    }
    for phase, batch in batches.items():
        choice = KernelChoice(platform=platform)
        StepPrograms(HybridModel.abstract(config, dtype=dtype), tile_size=TILE, kernels=choice).trace(
            store, rows, batch
        )
        for operation, chosen in sorted(choice.chosen.items()):
            for name, why in chosen.items():
                yield phase, operation, name, why
