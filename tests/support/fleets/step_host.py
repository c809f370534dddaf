"""A host in miniature for tests of the step: fixed batch shapes, a store whose null slot and page hold NaN.

Compiling is what these tests spend their time on: nearly all share one decode and one prefill program.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch, SeatBatch, num_tiles
from mamba_jax.rows import init_rows
from mamba_jax.sampling import sampling_row
from mamba_jax.store import Replay
from tests.support.engines.spoiled_store import spoiled_store
from tests.support.engines.step_programs import shared_programs
from tests.support.models.golden_case import log_probs
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import STEP

TILE, PAGE, PAGES_PER_ROW = 8, 4, 12
DECODE_ROWS, PREFILL_ROWS, PREFILL_TOKENS, TILES = 6, 6, 48, 12


@functools.cache
def programs_of(config=STEP, source=None):
    return shared_programs(long_memory_model(config), tile_size=TILE, source=source, greedy=config is not STEP)


def expected_logprobs(tokens, config=STEP):
    """Log-probabilities after each of `tokens`, by the whole-sequence form: [len(tokens), VOCAB]."""
    return log_probs(long_memory_model(config), tokens, PREFILL_TOKENS)


def greedy(tokens, count, config=STEP):
    """The next `count` tokens, by the whole-sequence form."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(expected_logprobs(tokens, config)[-1].argmax()))
    return tokens[-count:]


class Host:
    """Store, rows and programs."""

    def __init__(self, config=STEP, *, num_drafts=3, source=None, interval=None):
        """`interval`: rows are held by replay."""
        self.config, self.num_drafts = config, num_drafts
        self.replay = None if interval is None else Replay(interval, num_drafts)
        self.programs = programs_of(config, source)
        # Everything is garbage until it is written; the null slot and page are the worst garbage, for good.
        sizes = {"num_slots": 500, "num_pages": 500, "page_size": PAGE, "num_tails": 0 if interval is None else 9}
        self.store = spoiled_store(config, **sizes, dtype=jnp.float32, debug_state=True, replay=self.replay)
        sizes = {"max_num_seqs": 8, "num_speculative_tokens": num_drafts, "max_len": PREFILL_TOKENS}
        self.rows = init_rows(config, **sizes, source=source, replay=interval is not None)
        self.pages_per_row = PAGES_PER_ROW if self.store.kv else 0

    def table(self, row):
        """The pages of row number `row`, where a test does not say otherwise."""
        return np.arange(PAGES_PER_ROW) + 1 + row * PAGES_PER_ROW if self.pages_per_row else np.zeros(0, int)

    def sharing(self, row, pages):
        """The first pages of row number 0, and then the row's own, of which the first one begins as a copy."""
        table = np.concatenate([self.table(0)[:pages], self.table(row)[pages:]])
        return {"table": table, "page_copy": (self.table(0)[pages], table[pages])}

    def seat(self, row_id, *, output_counts=None, prompt_seen=None, tokens=None, **sampling):
        if tokens is not None:
            tokens = np.pad(np.array(tokens, np.int32), (0, PREFILL_TOKENS - len(tokens)), constant_values=-1)
        batch = SeatBatch(np.int32(row_id), sampling_row(**sampling), output_counts, prompt_seen, tokens)
        self.rows = self.programs.change_rows(self.rows, batch)

    def prefill(self, *rows, tile_size=TILE):
        """Runs a prefill step; rows as of `prefill_batch`."""
        return self._run(self.prefill_batch(*rows, tile_size=tile_size))

    def decode(self, *rows):
        """Runs a decode step; rows as of `decode_batch`."""
        return self._run(self.decode_batch(*rows))

    def mixed(self, decode, prefill):
        """Runs a step with decode rows and prefill rows."""
        return self._run(MixedBatch(self.decode_batch(*decode), self.prefill_batch(*prefill)))

    def prefill_batch(self, *rows, tile_size=TILE):
        """Each row is a dict: row_id, tokens, c, read, write (the last tile's slot), writes (all tiles'), sample."""
        sizes = {"tokens": PREFILL_TOKENS, "rows": PREFILL_ROWS, "tiles": TILES, "pages_per_row": self.pages_per_row}
        batch = PrefillBatch.empty(**sizes, tile_size=tile_size)
        at = tile = 0
        batch.tokens[:] = 7  # padding may be anything
        for i, row in enumerate(rows):
            q, c = len(row["tokens"]), row.get("c", 0)
            tiles = num_tiles(c, q, TILE)
            batch.tokens[at : at + q] = row["tokens"]
            batch.row_id[i], batch.length[i], batch.num_tokens[i] = row.get("row_id", i + 1), c, q
            batch.read_slot[i] = row.get("read", 0)
            batch.page_table[i] = row.get("table", self.table(i))
            batch.page_copy[i] = row.get("page_copy", (0, 0))
            batch.sample[i] = row.get("sample", True)
            batch.tile_write_slot[tile : tile + tiles] = row.get("writes", [0] * (tiles - 1) + [row.get("write", 0)])
            at, tile = at + q, tile + tiles
        return batch

    def decode_batch(self, *rows):
        """Each row is a dict: row_id, continues, tokens (certain, then drafts), drafts (how many), c, read, writes; and
        anchor (how much of c is in the slot read) under replay.
        """
        sizes = {"rows": DECODE_ROWS, "num_speculative_tokens": self.num_drafts, "pages_per_row": self.pages_per_row}
        batch = DecodeBatch.empty(**sizes, replay=self.replay is not None)
        for i, row in enumerate(rows):
            tokens, drafts = row.get("tokens", []), row.get("drafts", 0)
            batch.row_id[i], batch.continues[i] = row.get("row_id", i + 1), row.get("continues", False)
            batch.tokens[i, : len(tokens)] = tokens
            batch.length[i], batch.read_slot[i] = row.get("c", 0), row.get("read", 0)
            batch.num_tokens[i] = 1 + drafts if batch.continues[i] else len(tokens)
            batch.num_drafts[i] = drafts
            if batch.anchor is not None:
                batch.anchor[i] = row.get("anchor", row.get("c", 0))
            batch.write_slot[i, : len(row["writes"])] = row["writes"]
            batch.page_table[i] = row.get("table", self.table(i))
            batch.page_copy[i] = row.get("page_copy", (0, 0))
            batch.sample[i] = row.get("sample", True)
        return batch

    def with_drafts(self, row_id, drafts):
        """The rows, with drafts noted on one seat as a program that proposes them would."""
        return dataclasses.replace(self.rows, drafts=self.rows.drafts.at[row_id].set(jnp.asarray(drafts)))

    def _run(self, batch):
        self.store, self.rows, output = self.programs.step(self.store, self.rows, batch)
        for leaf in jax.tree.leaves((self.store.slots, self.store.kv, self.store.hidden)):
            assert np.isnan(leaf[0]).all(), "the null slot or page was written"
        return jax.tree.map(np.asarray, output)

    def assert_updated_in_place(self, batch):
        """The program of a batch has no second store, and pages of drafts, written K times, are not copied once."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((self.store, self.rows)))
        memory = self.programs.program(self.store, self.rows, batch).memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 10

    def slot(self, index):
        """All that slot `index` holds."""
        return [np.asarray(leaf[index]) for leaf in jax.tree.leaves((self.store.slots, self.store.hidden))]

    def logprobs(self, index):
        """The next token's log-probabilities, from the hidden state in a slot."""
        return np.asarray(jax.nn.log_softmax(long_memory_model(self.config).logits(self.store.hidden[index])))


@functools.cache
def state_after(tokens, config=STEP):
    """What a slot holds that has absorbed exactly `tokens` (a tuple), by one prefill of them alone."""
    host = Host(config)
    host.prefill({"tokens": tokens, "write": 1})
    return host.slot(1)


def assert_holds(host, slot, tokens):
    """Slot `slot` holds S(n) of exactly these tokens."""
    for have, want in zip(host.slot(slot), state_after(tuple(tokens), host.config), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-4, rtol=1e-4)
    assert int(host.store.tags[slot, 1]) == len(tokens)
