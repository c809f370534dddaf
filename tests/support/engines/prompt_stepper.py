"""Runs a case's prompts through the compiled steps, as a server would: one row for each prompt, packed together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.batch import DecodeBatch, PrefillBatch, SeatBatch, StepOutput, num_tiles
from mamba_jax.model import HybridModel
from mamba_jax.programs import StepBatch, StepPrograms
from mamba_jax.rows import init_rows
from mamba_jax.sampling import sampling_row
from tests.support.engines.spoiled_store import spoiled_store
from tests.support.engines.step_programs import shared_programs
from tests.support.stored_jit import StoredJit

TILE, PAGE = 32, 16
TOP = 20


class PromptStepper:
    """A model with its programs, for as many rows as there are prompts. `reset` before each use."""

    def __init__(
        self, model: HybridModel, prompts: list[np.ndarray], *, dtype=jnp.float32, programs: StepPrograms | None = None
    ) -> None:
        self.model, self.prompts = model, prompts
        self.programs = programs or shared_programs(model, tile_size=TILE)
        self._types = {"dtype": dtype, "ssm_dtype": dtype}
        lengths = [len(prompt) for prompt in prompts]
        self._tokens = -(-sum(lengths) // TILE) * TILE
        # A piece that begins and ends anywhere may touch one tile more than it would fill.
        self._tiles = sum(num_tiles(TILE - 1, length, TILE) for length in lengths)
        attentions = model.config.num_attention_uses + model.config.num_mtp_attention_layers
        self._pages_per_row = -(-(max(lengths) + TILE) // PAGE) if attentions else 0
        self._head = StoredJit(lambda model, hidden: jax.nn.log_softmax(model.logits(hidden)))

    def reset(self, adapters: list[int] | None = None) -> None:
        """All rows at their beginning. Slots and pages hold NaN until they are written, the null ones for ever.

        `adapters`: the entry of each row's adapter; None for programs without adapters.
        """
        count = len(self.prompts)
        sizes = {"num_slots": 1 + self._tiles + 2 * count, "num_pages": 1 + count * self._pages_per_row}
        self.store = spoiled_store(self.model.config, **sizes, page_size=PAGE, **self._types, debug_state=True)
        self.rows = init_rows(self.model.config, max_num_seqs=count, adapters=adapters is not None)
        for row, prompt in enumerate(self.prompts):
            sampling = sampling_row(prompt_length=len(prompt), logprobs=TOP, prompt_logprobs=TOP)
            entry = None if adapters is None else np.int32(adapters[row])
            seat = SeatBatch(row_id=np.int32(row + 1), sampling=sampling, adapter=entry)
            self.rows = self.programs.change_rows(self.rows, seat)
        self.length = [0] * count
        self.slot = [0] * count

    def prefill(
        self, pieces: dict[int, int], *, every_tile: bool = False
    ) -> tuple[StepOutput, dict[tuple[int, int], int]]:
        """Feeds each row's next so many prompt tokens, all in one step.

        With `every_tile` the state at every tile's end is kept, otherwise at the pieces' ends only.

        Returns:
            the step's output (its row j is the j-th piece), and the slot of each (row, tokens absorbed) kept.
        """
        sizes = {"tokens": self._tokens, "rows": len(self.prompts), "tiles": self._tiles, "tile_size": TILE}
        batch = PrefillBatch.empty(**sizes, pages_per_row=self._pages_per_row)
        written: dict[tuple[int, int], int] = {}
        token = tile = 0
        for j, (row, count) in enumerate(pieces.items()):
            begin = self.length[row]
            end = begin + count
            batch.tokens[token : token + count] = self.prompts[row][begin:end]
            token += count
            batch.row_id[j], batch.length[j], batch.num_tokens[j] = row + 1, begin, count
            batch.read_slot[j], batch.sample[j] = self.slot[row], end == len(self.prompts[row])
            batch.page_table[j] = self._pages(row)
            stops = [*range((begin // TILE + 1) * TILE, end, TILE), end]
            for stop in stops:
                if stop == end:
                    batch.tile_write_slot[tile] = written[row, stop] = self._other_slot(row)
                elif every_tile:
                    batch.tile_write_slot[tile] = written[row, stop] = 1 + 2 * len(self.prompts) + tile
                tile += 1
            self.length[row], self.slot[row] = end, written[row, end]
        return self._run(batch), written

    def decode(self, rows: list[int]) -> StepOutput:
        """Feeds each row's next token: of the prompt while there is any, then the one it has sampled itself.

        Row j of the output is that of the j-th of `rows`.
        """
        batch = DecodeBatch.empty(rows=len(self.prompts), num_speculative_tokens=0, pages_per_row=self._pages_per_row)
        for j, row in enumerate(rows):
            batch.row_id[j], batch.num_tokens[j], batch.sample[j] = row + 1, 1, True
            batch.write_slot[j, 0] = self._other_slot(row)
            batch.page_table[j] = self._pages(row)
            if self.length[row] < len(self.prompts[row]):
                batch.tokens[j, 0] = self.prompts[row][self.length[row]]
                batch.length[j], batch.read_slot[j] = self.length[row], self.slot[row]
            else:
                batch.continues[j] = True
            self.length[row] += 1
            self.slot[row] = int(batch.write_slot[j, 0])
        return self._run(batch)

    def _run(self, batch: StepBatch) -> StepOutput:
        self.store, self.rows, output = self.programs.step(self.store, self.rows, batch)
        assert not output.tag_error
        return jax.device_get(output)

    def log_probs(self, slots: list[int]) -> np.ndarray:
        """Log-probabilities [len(slots), vocab] of the next token, from the hidden states that slots hold."""
        padded = np.zeros(self._tiles + len(self.prompts), np.int32)
        padded[: len(slots)] = slots
        return np.asarray(self._head(self.model, self.store.hidden[padded]))[: len(slots)]

    def _pages(self, row: int) -> np.ndarray:
        return 1 + row * self._pages_per_row + np.arange(self._pages_per_row)

    def _other_slot(self, row: int) -> int:
        """Each row goes back and forth between two slots."""
        first, second = 1 + 2 * row, 2 + 2 * row
        return second if self.slot[row] == first else first
