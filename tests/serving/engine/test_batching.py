"""Plans as arrays: shapes for whatever may be planned, padding that says nothing, buffers that are not overwritten."""

import random
from dataclasses import replace

import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from mamba_jax.programs import StepBatch
from serving.core.cache.retention import MAX_MARKS, RetentionPolicy
from serving.core.cache.row_pages import PageTable
from serving.core.cache.row_state import StateAccess
from serving.core.config import SchedulerConfig
from serving.core.planning.plan import DecodeRow, PrefillRow
from serving.core.requests.request import Request
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps import batching
from serving.engine.steps.batching import BatchBuilder, PrefillShape, decode_buckets, prefill_buckets
from tests.serving.core.drive import Loop


def config(**settings):
    given = {
        "num_slots": 100, "num_pages": 300, "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512,
        "page_size": 8, "state_block_size": 64, "tile_size": 32, "max_prefill_rows": 16,
    }  # fmt: skip
    return SchedulerConfig(**(given | settings))


def decode_row(row_id, pages, **fields):
    tokens = fields.pop("tokens", [9])
    given = {
        "request": Request(f"r{row_id}", [*range(7), *tokens]), "row_id": row_id, "length": 7,
        "num_tokens": len(tokens), "num_drafts": 0, "access": StateAccess(3, fields.pop("writes", [4])),
        "pages": PageTable(pages),
        "page_copy": None, "sample": True, "is_prefill": True, "step": 1,
    }  # fmt: skip
    return DecodeRow(**(given | fields))


def prefill_row(row_id, start, count, slots, pages):
    request = Request(f"r{row_id}", list(range(1, 500)))
    return PrefillRow(request, row_id, start, count, 0, StateAccess(5, slots), PageTable(pages), None, True, True, 1)


def test_decode_sizes():
    assert decode_buckets(1) == [1]
    assert decode_buckets(33) == [1, 4, 8, 16, 32, 33]
    assert decode_buckets(33, coarse=1) == [4, 16, 33]
    assert decode_buckets(256, coarse=2) == [4, 64, 256]
    assert decode_buckets(1, coarse=1) == [1]
    assert decode_buckets(64, coarse=3) == [64]


@pytest.mark.parametrize("tokens", [1, 31, 64, 100, 512, 2048, 4096])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_every_plan_has_a_shape_and_little_padding(tokens, rows):
    settings = config(max_num_batched_tokens=tokens, max_prefill_rows=rows)
    shapes = prefill_buckets(settings)
    assert shapes == sorted(set(shapes))
    assert shapes[-1].holds(tokens, settings.max_prefill_rows, settings.tiles)
    for count in range(1, tokens + 1):
        tiles = -(-count // settings.tile_size) + 1
        shape = next(shape for shape in shapes if shape.holds(count, 1, min(tiles, settings.tiles)))
        assert shape.tokens <= max(64, (2 if count <= 256 else 1.5) * count + 32)
    for some in (prefill_buckets(settings, coarse=coarse) for coarse in (1, 2, 3)):
        assert set(some) <= set(shapes)
        assert some[-1] == shapes[-1]


@pytest.mark.parametrize(("coarse", "programs"), [(1, (3, 6, 3)), (2, (2, 4, 2)), (3, (1, 2, 1))])
def test_accelerators_have_few_programs(coarse, programs):
    settings = config(max_num_seqs=64, num_slots=200, max_num_batched_tokens=2048, max_prefill_rows=32)
    batches = BatchBuilder(settings, mixed_steps=True, coarse=coarse)
    assert batches.step_programs == programs
    steps = [each for each in batches.warm_up_batches(8) if isinstance(each, StepBatch)]
    assert len(steps) == sum(programs)


def test_decode_rows_and_padding():
    batches = BatchBuilder(config())
    first = batches.decode([decode_row(2, [7, 8]), decode_row(5, [9], is_prefill=False)])
    assert first.row_id.tolist() == [2, 5, 0, 0]
    assert first.continues.tolist() == [False, True, False, False]
    assert first.tokens[:, 0].tolist() == [9, 0, 0, 0]
    assert first.write_slot[:, 0].tolist() == [4, 4, 0, 0]
    second = batches.decode([decode_row(2, [7, 8, 11], page_copy=(8, 12), writes=[], tokens=[])])
    assert second.row_id.tolist() == [2]
    assert second.page_copy.tolist() == [[8, 12]]
    third = batches.decode([decode_row(2, [1]), decode_row(3, [2]), decode_row(4, [3])])
    assert third.row_id.tolist() == [2, 3, 4, 0]
    again = batches.decode([decode_row(1, [])] * 3)
    assert third.row_id.tolist() == [2, 3, 4, 0], "the device may still be reading the batch before"
    assert again.row_id.tolist() == [1, 1, 1, 0]


def test_drafts_are_wide_rows():
    batches = BatchBuilder(config(num_speculative_tokens=2))
    drafting = decode_row(1, [1], is_prefill=False, num_tokens=3, num_drafts=2, writes=[4, 5, 6])
    tail = decode_row(2, [2], tokens=[5, 6], writes=[0, 7])
    batch = batches.decode([drafting, tail])
    assert batch.tokens.tolist()[:2] == [[-1, -1, -1], [5, 6, -1]]
    assert batch.write_slot.tolist()[:2] == [[4, 5, 6], [0, 7, 0]]
    assert batch.num_drafts.tolist()[:2] == [2, 0]
    assert not batch.write_slot[2:].any()


def test_steps_without_drafts_are_narrow_where_that_is_wanted():
    batches = BatchBuilder(config(num_speculative_tokens=2), narrow_steps=True)
    plain = decode_row(1, [1], tokens=[5], writes=[4])
    nothing_fed = decode_row(2, [2], tokens=[], writes=[])
    drafting = decode_row(3, [3], is_prefill=False, num_tokens=2, num_drafts=1, writes=[5, 6])
    tail = decode_row(4, [4], tokens=[5, 6], writes=[0, 7])
    narrow = batches.decode([plain, nothing_fed])
    assert narrow.tokens.shape[1] == narrow.write_slot.shape[1] == 1
    assert narrow.write_slot[:2, 0].tolist() == [4, 0]
    for other in (drafting, tail):
        assert batches.decode([plain, other]).tokens.shape[1] == 3


def test_a_step_is_one_batch_if_its_program_is_ready():
    batches = BatchBuilder(config(), mixed_steps=True)
    decode, prefill = [decode_row(2, [7, 8])], [prefill_row(1, 0, 40, [0, 8], [1])]
    (mixed,) = batches.step(decode, prefill)
    assert mixed.decode.row_id.tolist() == [2, *[0] * 15], "the decode part has the widest shape"
    assert mixed.prefill.tokens[:40].tolist() == [*range(1, 41)]
    assert [type(batch) for batch in batches.step(decode, [])] == [DecodeBatch]
    every = list(batches.warm_up_batches(vocab_size=11))
    batches.use_only(batch for batch in every if not isinstance(batch, MixedBatch))
    assert [type(batch) for batch in batches.step(decode, prefill)] == [DecodeBatch, PrefillBatch]
    for batch in every:
        batches.use_also(batch)
    assert [type(batch) for batch in batches.step(decode, prefill)] == [MixedBatch]


def test_prefill_rows_are_packed():
    batches = BatchBuilder(config())
    for _ in range(2):
        batch = batches.prefill([prefill_row(1, 0, 40, [0, 8], [1]), prefill_row(2, 30, 10, [0, 9], [2, 3])])
        assert batch.tokens[:50].tolist() == [*range(1, 41), *range(31, 41)]
        assert not batch.tokens[50:].any()
        assert batch.tile_write_slot.tolist() == [0, 8, 0, 9]
        assert batch.length[:2].tolist() == [0, 30]
        assert batch.num_tokens[:3].tolist()[:2] == [40, 10]
        batches.prefill([prefill_row(1, 0, 60, [7, 8], [4])])


@pytest.mark.parametrize(("mode", "most"), [("none", 1), ("align", 9), ("all", 13)])
def test_a_row_writes_no_more_states_than_its_program_exchanges(mode, most):
    """At its end, at marks and at blocks, for each place of its tokens; a long row may write as many."""
    settings = config(cache_mode=mode, tile_size=8)
    policy = RetentionPolicy(settings)
    for tokens in range(1, 200):
        written = set()
        for start in range(64):
            end = start + tokens
            marks = [at for at in range(start + 1, end) if at % 8 == 0 and at % 64][:MAX_MARKS]
            written.add(len({end, *(at for at, *_ in policy.positions(1000, [], start, end, marks))}))
        assert max(written) <= policy.most_states(tokens, 1)
    assert max(written) == policy.most_states(199, 1) == most
    with pytest.raises(AssertionError, match="writes 32 states, of at most"):
        BatchBuilder(replace(settings, context_members=2)).prefill([prefill_row(1, 0, 256, [*range(1, 33)], [1])])
    shape = PrefillShape(256, 1, 33)
    assert BatchBuilder(settings).empty_prefill(shape).most_writes == 33  # engines of all modes have one program


def test_seats_count_tokens_only_for_penalties():
    batches = BatchBuilder(config())
    given = {"seed": 1, "choice": 0, "prompt": [3, 3, 4], "output": [5, 5], "stop_ids": (), "vocab_size": 8}
    assert batches.seat(1, SamplingParams(), **given).output_counts is None
    batch = batches.seat(1, SamplingParams(repetition_penalty=1.5), **given)
    assert batch.output_counts.tolist() == [0, 0, 0, 0, 0, 2, 0, 0]
    assert np.flatnonzero(batch.prompt_seen).tolist() == [3, 4]
    assert batch.sampling.prompt_length == 3


def test_a_batch_takes_the_narrowest_program_that_is_there():
    batches = BatchBuilder(config(num_speculative_tokens=2), narrow_steps=True)
    every = list(batches.warm_up_batches(vocab_size=32))
    batches.use_only(every[: batches.num_essential])
    row = decode_row(1, [7])

    def widths():
        return batches.decode([row]).tokens.shape, batches.prefill([prefill_row(1, 0, 20, [9], [3])]).tokens.shape

    assert widths() == ((16, 3), (512,))
    for batch in reversed(every[batches.num_essential :]):  # wider ones first: each is taken at once
        batches.use_also(batch)
        if batch.tokens.ndim == 2:
            assert widths()[0] == batch.tokens.shape
        else:
            assert widths()[1] == batch.tokens.shape
    assert widths() == ((1, 1), (64,))
    assert batches.decode([row] * 5).tokens.shape == (8, 1)


class Tables:
    """What the device's programs do with the batches."""

    def __init__(self, config):
        self.batches = BatchBuilder(config)
        self.tables = np.zeros((config.num_rows + 1, config.pages_per_row), np.int32)
        self.sent = self.whole = 0

    def build(self, plan):
        for request in plan.admitted:
            self.batches.seat(
                request.progress.row_id, SamplingParams(), seed=0, choice=0, prompt=(), output=(), stop_ids=(),
                vocab_size=8,
            )  # fmt: skip
        found = self.batches.step(plan.decode, plan.prefill)
        return self.batches.tables.take_whole(), found

    def run(self, plan):
        whole, steps = self.build(plan)
        for request in plan.admitted:
            self.tables[request.progress.row_id] = 0
        for batch in whole:
            self.tables[batch.row_id] = batch.pages
            self.whole += 1
        for batch in steps:
            for seat, index, page in batch.page_updates:
                if index < self.tables.shape[1]:
                    self.tables[seat, index] = page
                self.sent += seat > 0
        for row in plan.rows:
            want = np.zeros(self.tables.shape[1], np.int32)
            want[: len(row.pages)] = row.pages[: len(want)]
            np.testing.assert_array_equal(self.tables[row.row_id], want)
        assert not self.tables[0].any()


@pytest.mark.smoke("room", "drafts")
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("seed", range(6))
def test_the_device_has_the_rows_tables(drafts, room, seed, monkeypatch):
    """Random requests share prefixes and there are too few pages; some plans are withdrawn once arrays are filled."""
    monkeypatch.setattr(batching, "_PAGES", room)
    rng = random.Random(seed)
    loop = Loop(rightness=0.5, num_speculative_tokens=drafts, num_pages=40, max_num_batched_tokens=24)
    tables = Tables(loop.config)
    schedule = loop.scheduler.schedule

    def checked():
        plan = schedule()
        if plan is not None and rng.random() < 0.15:
            tables.build(plan)
            loop.scheduler.withdraw(plan)
            tables.batches.tables.forget()
            plan = schedule()
        if plan is not None:
            tables.run(plan)
        return plan

    monkeypatch.setattr(type(loop.scheduler), "schedule", lambda _: checked())
    stems = [[rng.randrange(9) for _ in range(30)] for _ in range(3)]
    for _ in range(25):
        stem = rng.choice(stems)[: rng.randrange(31)]
        loop.add([*stem, *(rng.randrange(9) for _ in range(rng.randrange(1, 12)))], max_tokens=rng.randrange(1, 20))
        for _ in range(rng.randrange(4)):
            loop.step()
    loop.finish()
    assert tables.sent > 50
    assert loop.scheduler.stats()["preemptions"] > 0
    if not room:
        assert tables.whole > 0


def test_a_step_sends_new_pages_alone():
    batches = BatchBuilder(config())
    rows = [decode_row(seat, range(10 * seat, 10 * seat + 4)) for seat in (1, 2, 3)]
    batches.decode(rows)
    assert len(batches.tables.take_whole()) == 1, "12 pages, and the step has room for 8"
    assert not batches.decode(rows).page_updates.any()
    rows[1].pages.append(99)
    rows[2].pages.pop()
    updates = batches.decode(rows).page_updates
    assert updates[:3].tolist() == [[2, 4, 99], [3, 3, 0], [0, 0, 0]]
    rows[0].pages[2] = 55
    assert batches.decode(rows).page_updates[:3].tolist() == [[1, 2, 55], [1, 3, 13], [0, 0, 0]]
    assert not batches.tables.take_whole()


def test_arrays_do_not_grow_with_the_longest_sequence():
    def sizes(length):
        every = BatchBuilder(config(max_model_len=length)).warm_up_batches(8)
        return [batch.page_updates.shape for batch in every if hasattr(batch, "page_updates")]

    assert sizes(512) == sizes(1 << 20)
