"""Batches as bytes and back; whatever else arrives is refused in a line."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_jax.program_cache import look_of
from serving.core.config import SchedulerConfig
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.batching import BatchBuilder
from serving.hosts.host import Receiver, WireError, to_bytes

VOCAB = 100


def builder(**changes):
    sizes = {"num_slots": 20, "num_pages": 20, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 96}
    config = SchedulerConfig(**(sizes | {"page_size": 8, "state_block_size": 32, "tile_size": 16} | changes))
    return BatchBuilder(config, seats_bring_tokens=True, masks=True, narrow_steps=True, mixed_steps=True)


RECEIVER = Receiver(builder().warm_up_batches(VOCAB))


def whole(batch, number=0):
    return b"".join(to_bytes(number, batch))


@pytest.mark.parametrize("changes", [{}, {"num_speculative_tokens": 3}, {"replay_interval": 8}, {"num_pages": 0}])
def test_every_batch_comes_out_as_it_went_in(changes):
    rng, kinds, reading = np.random.default_rng(0), set(), Receiver(builder(**changes).warm_up_batches(VOCAB))
    for number, warming in enumerate(builder(**changes).warm_up_batches(VOCAB)):
        # The same batch with other numbers in it.
        batch = jax.tree.map(lambda x: (rng.integers(0, 2, np.shape(x)) * 1).astype(x.dtype)[()], warming)
        again, found = reading.from_bytes(whole(batch, number))
        assert again == number
        assert look_of(found) == look_of(batch), "the same program"
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
            np.testing.assert_array_equal(one, other)
        kinds.add(type(found).__name__)
    tables = {"PageTableBatch"} if changes.get("num_pages", 1) else set()
    assert kinds == {"DecodeBatch", "PrefillBatch", "MixedBatch", "SeatBatch", "MaskBatch"} | tables


def test_a_seat_keeps_its_numbers():
    params = SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, logit_bias={3: 1.5})
    seat = builder().seat(2, params, seed=1 << 60, choice=1, prompt=[1, 2], output=[3], stop_ids=[4], vocab_size=VOCAB)
    _, found = RECEIVER.from_bytes(whole(seat))
    assert float(found.sampling.temperature) == pytest.approx(0.7)
    assert found.output_counts.tolist() == seat.output_counts.tolist()
    assert found.sampling.key.tolist() == seat.sampling.key.tolist()


WHOLE = whole(builder()._empty_masks(VOCAB))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"", "no header"), (WHOLE[:20], "no header"), (WHOLE[:-1], "bytes, expected"),
        (WHOLE + b"x", "bytes, expected"), (WHOLE[:8] + bytes(16) + WHOLE[24:], "no program"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(wrong, why):
    with pytest.raises(WireError, match=why):
        RECEIVER.from_bytes(wrong)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_batch_with_a_changed_byte_is_a_batch_or_refused(place, value):
    made = bytearray(WHOLE)
    made[place % len(made)] = value
    with contextlib.suppress(WireError):
        assert type(RECEIVER.from_bytes(bytes(made))[1]).__name__ == "MaskBatch"
