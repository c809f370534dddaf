"""Converts a step's plan to numpy arrays for the compiled programs, padded to one of a few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mamba_jax.batch import DecodeBatch, MixedBatch, PageTableBatch, PrefillBatch, SeatBatch, num_tiles
from mamba_jax.sampling.masks import MaskBatch
from mamba_jax.sampling.table import sampling_row
from mamba_jax.sharding.axis import shares_of
from serving.core.cache.retention import RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.planning.plan import DecodeRow, PrefillRow
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.page_tables import PageTables

_FEW_ROWS = 2
_MASKS = 16  # maximum number of rows with masks in one batch
_PAGES = 64  # pages found in the cache that even the narrowest prefill step can bring


@dataclass(frozen=True, order=True)
class PrefillShape:
    """One bucket of prefill steps, ordered by cost: tokens cost most, because they go through every layer; rows only go
    through the head."""

    tokens: int
    rows: int
    tiles: int

    def holds(self, tokens: int, rows: int, tiles: int) -> bool:
        """Returns whether a step of this size fits."""
        return tokens <= self.tokens and rows <= self.rows and tiles <= self.tiles


AnyBatch = DecodeBatch | PrefillBatch | MixedBatch | SeatBatch | MaskBatch | PageTableBatch


def _shape(batch: AnyBatch) -> tuple[int, ...]:
    if isinstance(batch, DecodeBatch):
        return tuple(batch.tokens.shape)
    if isinstance(batch, PrefillBatch):
        return batch.tokens.shape[0], batch.row_id.shape[0], batch.tile_write_slot.shape[0]
    if isinstance(batch, MixedBatch):
        return *_shape(batch.decode), *_shape(batch.prefill)
    return ()


def name_of(batch: AnyBatch) -> str:
    """Returns the name of a batch's program, for the log."""
    if isinstance(batch, DecodeBatch):
        rows, width = batch.tokens.shape
        return f"decode of {rows} x {width}"
    if isinstance(batch, PrefillBatch):
        return f"prefill of {batch.tokens.shape[0]} in {batch.row_id.shape[0]}"
    if isinstance(batch, MixedBatch):
        return f"{name_of(batch.decode)} with {name_of(batch.prefill)}"
    return {MaskBatch: "masks", PageTableBatch: "a page table"}.get(type(batch), "a seat")


def decode_buckets(max_rows: int, *, coarse: int = 0) -> list[int]:
    """Returns the row counts 1, 4, 8, 16, ... and `max_rows`. With `coarse` 1 and 2, they begin at 4 and are a factor
    of 4 and 16 apart; with 3, there is only `max_rows`.

    2 rows cost hardly less than 4.
    """
    if coarse == 3:
        return [max_rows]
    sizes, size = [] if coarse else [1], 4
    while size < max_rows:
        sizes.append(size)
        size *= (2, 4, 16)[coarse]
    return sorted({*sizes, max_rows})


def prefill_buckets(config: SchedulerConfig, most: int | None = None, *, coarse: int = 0) -> list[PrefillShape]:
    """Returns the shapes of prefill steps of up to `most` tokens (None: the settings'), the cheapest first. The last
    one fits all such steps.

    Shapes for one or two rows have many token counts (from 256 tokens up a factor of 1.5 or less apart), because
    padding tokens cost as much as other tokens. For many short prompts there are fewer, wider shapes, with room for a
    row (and its tile) every 16 tokens. With `coarse` 1 and 2, token counts begin at 256 and are a
    factor of 2 and 4 apart; with 3, there are one shape of 256 tokens and one of all.
    """
    most = -(-(most or config.max_num_batched_tokens) // 32) * 32
    rows = min(config.max_prefill_rows, config.num_rows)
    few = min(_FEW_ROWS, rows)
    shapes = {PrefillShape(most, few, _tiles(config, most, few)), PrefillShape(most, rows, config.tiles)}
    if coarse == 3:
        least = min(256, most)
        return sorted({PrefillShape(least, few, _tiles(config, least, few)), PrefillShape(most, rows, config.tiles)})
    size = 256 if coarse else 64
    while size < most:
        shapes.add(PrefillShape(size, few, _tiles(config, size, few)))
        if 256 <= size < most * 2 / 3 and not coarse:
            shapes.add(PrefillShape(size * 3 // 2, few, _tiles(config, size * 3 // 2, few)))
        many = min(size // 16, rows)
        if size.bit_length() % 2 == 0 and many > few:  # 128, 512, 2048, ...
            shapes.add(PrefillShape(size, many, _tiles(config, size, many)))
        size *= (2, 2, 4)[coarse]
    return sorted(shapes)


def _tiles(config: SchedulerConfig, tokens: int, rows: int) -> int:
    """Returns the maximum number of tiles for these numbers of tokens and rows: each row may begin and end inside a
    tile."""
    return min(-(-tokens // config.tile_size) + rows, config.tiles)


class BatchBuilder:
    """Fills batches, each in new arrays: JAX may read a host array without copying it, long after the dispatch."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        seats_bring_tokens: bool = False,
        masks: bool = False,
        narrow_steps: bool = False,
        mixed_steps: bool = False,
        coarse: int = 0,
        adapters: bool = False,
    ) -> None:
        """`seats_bring_tokens`: the draft source reads a sequence's tokens, also those that the model is never fed.
        `masks`: rows may have masks of allowed tokens.
        `narrow_steps`: decode steps in which no row has drafts have their own programs, one token wide.
        `mixed_steps`: decode and prefill rows run in one program. To limit the number of mixed programs, the decode
        part always has the widest shape, and only every second prefill shape has a mixed program.
        `coarse`: 1, 2 or 3 for TPUs. A step of few tokens takes as long as reading the weights, so narrower shapes
        save nothing, and the code of each program takes device memory.
        `adapters`: rows may have LoRA adapters.
        """
        self._config, self.masked, self._adapters = config, masks, adapters
        self._most_states = RetentionPolicy(config).most_states
        self._seats_bring_tokens = seats_bring_tokens
        self._drafts = config.num_speculative_tokens
        self._widths = (0, self._drafts) if narrow_steps and self._drafts else (self._drafts,)
        self._pages_per_row = config.pages_per_row
        self.decode_shapes = decode_buckets(config.num_rows, coarse=coarse)
        self._coarse, self._mixed_steps = coarse, mixed_steps
        self._set_prefill_shapes()
        self._usable: frozenset[tuple[int, ...]] | None = None
        self.tables = PageTables(config.num_rows, self._pages_per_row)
        """Page tables as earlier batches have sent them."""

    def _set_prefill_shapes(self, most: int | None = None) -> None:
        self.prefill_shapes = prefill_buckets(self._config, most, coarse=self._coarse)
        found = self.prefill_shapes[::-2][::-1] if self._mixed_steps else []
        # Only programs without decode rows divide their tokens over members.
        self.mixed_shapes = [each for each in found if shares_of(each.tokens, self._config.context_members) == 1]

    def halve_prefill(self) -> int:
        """Halves the tokens of the widest prefill step, before any step. Returns them; 0 if they are fewer than two
        tiles."""
        half = self.prefill_shapes[-1].tokens // 2
        if half < max(self._config.tile_size, 32):
            return 0
        self._set_prefill_shapes(half)
        return self.prefill_shapes[-1].tokens

    def warm_up_batches(self, vocab_size: int) -> Iterator[AnyBatch]:
        """Yields one batch of padding for each shape that can occur.

        The first `num_essential` batches are those without which some steps could not run. Narrower ones follow, the
        cheapest first.
        """
        for params in (SamplingParams(), SamplingParams(presence_penalty=1.0)):
            yield self.seat(0, params, seed=0, choice=0, prompt=(), output=(), stop_ids=(), vocab_size=vocab_size)
        if self.masked:
            yield self._empty_masks(vocab_size)
        if self._pages_per_row:
            yield PageTableBatch.empty(pages_per_row=self._pages_per_row)
        yield self.empty_prefill(self.prefill_shapes[-1])
        yield self.empty_decode(self.decode_shapes[-1], self._widths[-1])
        narrow = [(rows, drafts) for rows in self.decode_shapes for drafts in self._widths][:-1]
        for place in range(max(len(narrow), len(self.prefill_shapes) - 1)):
            for rows, drafts in narrow[place : place + 1]:
                yield self.empty_decode(rows, drafts)
            for shape in self.prefill_shapes[:-1][place : place + 1]:
                yield self.empty_prefill(shape)
        for shape in self.mixed_shapes:
            yield self.empty_mixed(shape)

    @property
    def step_programs(self) -> tuple[int, int, int]:
        """Numbers of programs of decode, prefill and mixed steps."""
        return len(self.decode_shapes) * len(self._widths), len(self.prefill_shapes), len(self.mixed_shapes)

    @property
    def num_essential(self) -> int:
        """Number of first batches of `warm_up_batches` that suffice for every step: the widest of each kind."""
        return 4 + self.masked + bool(self._pages_per_row)

    def use_only(self, batches: Iterable[AnyBatch]) -> None:
        """Restricts later batches to these shapes, because the programs for other shapes are not compiled yet."""
        self._usable = frozenset(map(_shape, batches))

    def use_also(self, batch: AnyBatch) -> None:
        """Allows this batch's shape from the next step on. One thread may call this while another fills batches."""
        if self._usable is not None:
            self._usable |= {_shape(batch)}

    def _may(self, *shape: int) -> bool:
        return self._usable is None or shape in self._usable

    def step(
        self, decode: Sequence[DecodeRow], prefill: Sequence[PrefillRow]
    ) -> tuple[DecodeBatch | PrefillBatch | MixedBatch, ...]:
        """Returns the batches of a step: one if there is a program for all of its rows, otherwise one of each kind."""
        if decode and prefill and self.mixed_shapes:
            size, width = self.decode_shapes[-1], self._widths[-1]
            for shape in self._fitting(self.mixed_shapes, prefill):
                if self._may(size, 1 + width, shape.tokens, shape.rows, shape.tiles):
                    empty = self.empty_decode(size, width), self.empty_prefill(shape)
                    return (MixedBatch(self._fill_decode(empty[0], decode), self._fill_prefill(empty[1], prefill)),)
        return (*([self.decode(decode)] if decode else []), *([self.prefill(prefill)] if prefill else []))

    def _fitting(self, shapes: Iterable[PrefillShape], rows: Sequence[PrefillRow]) -> Iterator[PrefillShape]:
        tokens = sum(row.num_tokens for row in rows)
        tiles = sum(num_tiles(row.length, row.num_tokens, self._config.tile_size) for row in rows)
        return (shape for shape in shapes if shape.holds(tokens, len(rows), tiles))

    def decode(self, rows: Sequence[DecodeRow]) -> DecodeBatch:
        """Returns a batch of the rows in their order, then padding."""
        count = len(rows)
        # The width is the same for all rows. If every row has one token, the narrow shape suffices.
        most = max(row.num_tokens for row in rows) - 1
        size, drafts = next(
            (size, width)
            for size in self.decode_shapes
            if size >= count
            for width in self._widths
            if width >= most and self._may(size, 1 + width)
        )
        return self._fill_decode(self.empty_decode(size, drafts), rows)

    def _fill_decode(self, batch: DecodeBatch, rows: Sequence[DecodeRow]) -> DecodeBatch:
        count, drafts = len(rows), batch.tokens.shape[1] - 1
        numbers = np.array(
            [(r.row_id, r.length, r.access.read, r.num_tokens, r.num_drafts, not r.is_prefill, r.sample) for r in rows],
            np.int32,
        )
        columns = (batch.row_id, batch.length, batch.read_slot, batch.num_tokens, batch.num_drafts, batch.continues)
        for i, column in enumerate((*columns, batch.sample)):
            column[:count] = numbers[:, i]
        if drafts:
            batch.tokens[:] = -1  # a draft that the host has not filled in is rejected
            for i, row in enumerate(rows):
                if row.is_prefill:
                    batch.tokens[i, : row.num_tokens] = row.tokens
        else:
            batch.tokens[:count, 0] = [r.tokens[0] if r.is_prefill and r.num_tokens else 0 for r in rows]
        if batch.anchor is not None:
            # A row that only samples reads a state that covers all its tokens. Others know their anchors.
            batch.anchor[:count] = batch.length[:count]
        if drafts and batch.anchor is None:
            for i, row in enumerate(rows):
                batch.write_slot[i, : len(row.access.writes)] = row.access.writes
        else:
            # Each row writes at most one slot, so the rows are not ragged.
            batch.write_slot[:count, 0] = [r.access.writes[0] if r.access.writes else 0 for r in rows]
        self._fill_pages(batch, rows)
        return batch

    def prefill(self, rows: Sequence[PrefillRow]) -> PrefillBatch:
        """Returns a batch of the rows in their order, with packed tokens, then padding."""
        fit = self._fitting(self.prefill_shapes, rows)
        shape = next(s for s in fit if self._may(s.tokens, s.rows, s.tiles))
        return self._fill_prefill(self.empty_prefill(shape), rows)

    def _fill_prefill(self, batch: PrefillBatch, rows: Sequence[PrefillRow]) -> PrefillBatch:
        at = tile = 0
        for i, row in enumerate(rows):
            batch.row_id[i], batch.length[i], batch.num_tokens[i] = row.row_id, row.length, row.num_tokens
            batch.read_slot[i], batch.sample[i] = row.access.read, row.sample
            batch.tokens[at : at + row.num_tokens] = row.tokens
            writes = row.access.writes
            batch.tile_write_slot[tile : tile + len(writes)] = writes
            at += row.num_tokens
            tile += len(writes)
        states = np.count_nonzero(batch.tile_write_slot)
        assert states <= batch.most_writes, f"a prefill step writes {states} states, of at most {batch.most_writes}"
        self._fill_pages(batch, rows)
        return batch

    @property
    def heads(self) -> int:
        """Maximum number of tokens that a row chooses in one step."""
        return 1 + self._drafts

    def masks(self, masks: Mapping[int, np.ndarray], vocab_size: int) -> Iterator[MaskBatch]:
        """Yields as many batches as needed for the seats' masks [H, words]."""
        left = list(masks.items())
        while left:
            batch = self._empty_masks(vocab_size)
            now, left = left[: len(batch.row_id)], left[len(batch.row_id) :]
            for i, (row_id, mask) in enumerate(now):
                batch.row_id[i], batch.bits[i] = row_id, mask
            yield batch

    def seat(
        self,
        row_id: int,
        params: SamplingParams,
        *,
        seed: int,
        choice: int,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Sequence[int],
        vocab_size: int,
        adapter: int = 0,
    ) -> SeatBatch:
        """Returns a request's sampling parameters; with penalties also which tokens it has seen so far.

        `adapter`: the entry of its adapter, 0 for none.
        """
        counts: Any = None
        seen: Any = None
        if params.penalized:
            counts = np.bincount(np.asarray(output, np.int64), minlength=vocab_size).astype(np.int32)
            seen = np.zeros(vocab_size, bool)
            seen[np.asarray(prompt, np.int64)] = True
        sampling = sampling_row(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=seed,
            choice=choice,
            prompt_length=len(prompt),
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
            logit_bias=params.logit_bias,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            prompt_logprob_ids=params.prompt_logprob_token_ids or (),
            sampling_mask=params.return_sampling_mask,
        )
        tokens: Any = None
        if self._seats_bring_tokens:
            known = [*prompt, *output]
            tokens = np.full(self._config.max_model_len, -1, np.int32)
            tokens[: len(known)] = known
        self.tables.clear(row_id)
        seat: Any = np.int32(row_id)
        entry: Any = np.int32(adapter) if self._adapters else None
        return SeatBatch(
            row_id=seat, sampling=sampling, output_counts=counts, prompt_seen=seen, tokens=tokens, adapter=entry
        )

    def _fill_pages(self, batch: DecodeBatch | PrefillBatch, rows: Sequence[DecodeRow | PrefillRow]) -> None:
        if batch.page_updates is None:
            return
        self.tables.fill(batch.page_updates, rows)
        for i, row in enumerate(rows):
            if row.page_copy is not None:
                batch.page_copy[i] = row.page_copy

    def _empty_masks(self, vocab_size: int) -> MaskBatch:
        rows = min(_MASKS, self._config.num_rows)
        return MaskBatch.empty(rows=rows, heads=self.heads, vocab_size=vocab_size)

    def empty_decode(self, rows: int, drafts: int) -> DecodeBatch:
        """Returns a batch of padding."""
        return DecodeBatch.empty(
            rows=rows,
            num_speculative_tokens=drafts,
            # A row fills a page from time to time; with drafts it may also free a page and allocate another.
            page_updates=2 * rows if self._pages_per_row else None,
            replay=self._config.replay_interval > 1,
        )

    def empty_mixed(self, shape: PrefillShape) -> MixedBatch:
        """Returns a batch of padding: the widest decode part, and a prefill part."""
        return MixedBatch(self.empty_decode(self.decode_shapes[-1], self._widths[-1]), self.empty_prefill(shape))

    def empty_prefill(self, shape: PrefillShape) -> PrefillBatch:
        """Returns a batch of padding."""
        pages = max(shape.tokens // self._config.page_size, _PAGES) + 4 * shape.rows
        divided = shares_of(shape.tokens, self._config.context_members) > 1
        return PrefillBatch.empty(
            tokens=shape.tokens,
            rows=shape.rows,
            tiles=shape.tiles,
            page_updates=pages if self._pages_per_row else None,
            tile_size=self._config.tile_size,
            # Without an exchange, engines of other cache modes have the same programs.
            most_writes=self._most_states(shape.tokens, shape.rows) if divided else None,
        )
