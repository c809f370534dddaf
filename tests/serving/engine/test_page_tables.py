"""The page tables that the device keeps are those of the rows, and steps send no more than what has changed."""

import random

import numpy as np
import pytest

from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps import batching
from serving.engine.steps.batching import BatchBuilder
from tests.serving.core.drive import Loop
from tests.serving.engine.test_batching import config, decode_row, prefill_row


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
        found = []
        if plan.decode:
            found.append(self.batches.decode(plan.decode))
        if plan.prefill:
            found.append(self.batches.prefill(plan.prefill))
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


def test_a_seats_next_tenant_begins_with_zeros():
    batches = BatchBuilder(config())
    batches.decode([decode_row(2, [7, 8])])
    given = {"seed": 1, "choice": 0, "prompt": [], "output": [], "stop_ids": (), "vocab_size": 8}
    batches.seat(2, SamplingParams(), **given)
    assert batches.decode([decode_row(2, [7])]).page_updates.tolist() == [[2, 0, 7], [0, 0, 0]]


def test_a_long_prefix_that_was_found_is_sent_before_the_step():
    batches = BatchBuilder(config(num_pages=300, max_model_len=4096))
    batch = batches.prefill([prefill_row(1, 480, 10, [9], range(1, 300)), prefill_row(2, 0, 10, [8], [300, 301])])
    (table,) = batches.tables.take_whole()
    assert (table.row_id, table.pages[:300].tolist()) == (1, [*range(1, 300), 0])
    assert batch.page_updates[:3].tolist() == [[2, 0, 300], [2, 1, 301], [0, 0, 0]]


def test_arrays_do_not_grow_with_the_longest_sequence():
    def sizes(length):
        every = BatchBuilder(config(max_model_len=length)).warm_up_batches(8)
        return [batch.page_updates.shape for batch in every if hasattr(batch, "page_updates")]

    assert sizes(512) == sizes(1 << 20)
