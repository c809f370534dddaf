"""What is published is never written again, byte for byte, until it is evicted."""

import jax
import numpy as np
import pytest

from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.shared_engines import SMALLEST, TILE, engines_of
from tests.support.models.tiny_configs import ENGINE_VOCAB

_RNG = np.random.default_rng(11)
FIRST, OTHER, TAIL = (_RNG.integers(0, ENGINE_VOCAB, count).tolist() for count in (41, 12, 30))
# Waves of prompts: each is asked while the answers to the one before are still coming.
WAVES = (
    [FIRST[:21], OTHER, [5]],
    [FIRST[:21], FIRST[:18], FIRST[:17], OTHER],
    [FIRST[:16] + TAIL[:2], FIRST[:21] + TAIL[:12], FIRST, TAIL[:25]],
    [FIRST, FIRST[:32] + TAIL[:3], FIRST[:40], OTHER + TAIL[:9]],
    [FIRST[:24] + TAIL[:1], TAIL[:25], TAIL[:24] + OTHER, FIRST[:21]],
    [FIRST[:21] + TAIL[:12], FIRST[:40] + OTHER[:2], TAIL[:16], [7, 8]],
)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_what_was_hit_stays_as_it_was_byte_for_byte(mode: str) -> None:
    engine = engines_of(SMALLEST).engine(mode, state_block_size=TILE, max_num_batched_tokens=28)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    kept: dict[tuple[str, int], tuple[object, list[bytes]]] = {}
    compared = 0
    for wave, prompts in enumerate([*WAVES, *WAVES]):
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{wave}.{i}", {"prompt_token_ids": prompt}, params)
        while engine.loop.busy and (engine.num_unfinished > 2 or wave % 2):
            engine.step()
            store = engine.loop.store
            arrays = {"slots": [*jax.tree.leaves(store.slots), store.hidden], "pages": list(store.kv)}
            for pool in engine.loop.scheduler.pools:
                kind = pool.name
                contents = [np.asarray(array) for array in arrays[kind]]
                for index, owner in enumerate(pool.owners):
                    if owner is None:
                        kept.pop((kind, index), None)
                        continue
                    now = [content[index].tobytes() for content in contents]
                    before = kept.setdefault((kind, index), (owner, now))
                    if before[0] is owner:
                        assert before[1] == now, f"{kind} {index} has changed while it was published"
                        compared += 1
                    else:
                        kept[kind, index] = owner, now
    stats = engine.loop.scheduler.stats()
    assert compared > 1000
    assert stats["full_hits"] > 3
    assert stats["page_copies"] > 3
