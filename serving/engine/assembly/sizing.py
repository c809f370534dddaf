"""Computes the numbers of slots and pages from the free memory, and reports them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mamba_jax.sharding.axis import LEAST_TOKENS, shares_of
from mamba_jax.store import Replay, StoreShape
from serving.config import CacheMode, ConfigError, EngineConfig
from serving.engine.assembly.free_memory import GIB, show_bytes
from serving.engine.assembly.replay import spares

CPU_STORE_TOKENS = 1 << 18
"""On a CPU, the store of a small model is limited to this number of tokens."""
CODE_PER_LAYER = {"tpu": (500_000, 600_000, 1_200_000)}
"""Bytes of code for each layer of a program of decode, prefill and mixed steps, by platform: a third more than those of
Nemotron-H-8B, compiled for v5e-8 (18, 23 and 45 MiB)."""
LONG_CODE, LONG_CODE_PER_LAYER = "DE", {"tpu": (2_500_000, 10_000_000, 12_500_000)}
"""Kinds of layers with more code, and their bytes: what four more layers (`DE*E`) add to programs of Qwen3-Next for
v6e-8 (7.2 MB to decode of 64 rows, 28.6 MB to prefill of 2,048 tokens), all but the attention's."""
MOST_CODE = GIB
"""Beyond it, there are fewer programs."""


class StoreTooSmallError(ConfigError):
    """The memory does not hold one sequence. `needed`: bytes of the smallest store that does."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class StoreSize:
    """The size of the store. The numbers of slots and pages include the null slot and the null page."""

    num_slots: int
    """Without those of learned initial states, which come after them."""
    num_pages: int
    max_num_seqs: int
    max_model_len: int
    pages_per_row: int
    """Width of the page table."""
    running_slots: int
    """Private slots for all running sequences: the maximum, or with replay a number that nearly always suffices."""
    bytes_per_slot: int
    bytes_per_page: int
    page_size: int
    state_block_size: int
    mode: CacheMode
    notices: tuple[str, ...] = ()
    replay_interval: int = 1
    """Number of tokens between the states that decoding writes; 1 = snapshots."""
    bytes_per_tail: int = 0
    """Size of the tail of each running sequence; 0 without replay."""
    initial_states: int = 0
    """Slots for learned initial states."""
    members: int = 1
    """Devices that pages are divided over by position. Each has as many, and a null page of its own."""

    @property
    def tail_bytes(self) -> int:
        """Size of all tails, the null one included."""
        return (1 + self.max_num_seqs) * self.bytes_per_tail

    @property
    def total_bytes(self) -> int:
        """Size of the whole store, on a device of each member."""
        slots = self.num_slots + self.initial_states
        return slots * self.bytes_per_slot + self.num_pages // self.members * self.bytes_per_page + self.tail_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of state that decoding writes per token."""
        if self.replay_interval == 1:
            return self.bytes_per_slot
        return (self.bytes_per_slot + self.bytes_per_tail) / self.replay_interval

    @property
    def slots_for_reuse(self) -> int:
        """Slots beyond those for running sequences."""
        return max(self.num_slots - 1 - self.running_slots, 0)

    @property
    def usable_pages(self) -> int:
        """Pages of all members, without null pages."""
        return max(self.num_pages - self.members, 0)

    @property
    def tokens_in_pages(self) -> int:
        """Tokens whose keys and values the pages hold; 0 for a model without attention."""
        return self.usable_pages * self.page_size

    def sequences_at(self, tokens: int) -> int:
        """Returns the number of sequences of this many tokens that run at once."""
        if not self.num_pages:
            return self.max_num_seqs
        pages = -(-tokens // (self.page_size * self.members)) * self.members  # the first member has the most
        return min(self.max_num_seqs, self.usable_pages // pages)

    def report(self) -> str:
        """Returns the sizes, in words."""
        running = f"{self.max_num_seqs} x {self.running_slots // self.max_num_seqs}"
        if self.replay_interval > 1:
            running = f"{self.max_num_seqs} anchors and {self.running_slots - self.max_num_seqs} spares"
        lines = [
            f"state store: {show_bytes(self.total_bytes)}; up to {self.max_num_seqs} sequences at once (room for "
            f"{self.sequences_at(self.max_model_len):,} at the full {self.max_model_len:,} tokens)",
            f"  slots: {self.num_slots - 1:,} of {show_bytes(self.bytes_per_slot)} "
            f"({running} for running sequences, {self.slots_for_reuse:,} for reuse)",
        ]
        if self.initial_states:
            lines.append(f"  initial states: {self.initial_states:,} more slots")
        if self.replay_interval > 1:
            lines.append(
                f"  replay: {self.running_slots / self.max_num_seqs:.2f} slots for each running sequence: an anchor, "
                f"and a spare near the end of each interval of {self.replay_interval} tokens; "
                f"{show_bytes(self.bytes_per_tail)} of inputs for each sequence ({show_bytes(self.tail_bytes)} in all)"
            )
        if self.num_pages:
            lines.append(
                f"  pages: {self.usable_pages:,} of {show_bytes(self.bytes_per_page)} = {self.tokens_in_pages:,} "
                f"tokens ({self.page_size} tokens a page)"
                + (f", divided by position over {self.members} members" if self.members > 1 else "")
            )
        else:
            lines.append("  pages: none, the model has no attention")
        if self.mode == "none":
            lines.append("  prefix reuse: off")
        else:
            lines.append(
                f"  prefix reuse: mode {self.mode!r}; the smallest reusable prefix is {self.state_block_size} tokens "
                "or a whole prompt"
            )
        return "\n".join(lines)


def size_store(
    config: EngineConfig,
    shape: StoreShape,
    *,
    mode: CacheMode,
    dtype: Any,
    model_max_len: int | None,
    memory: int,
    most_tokens: int = CPU_STORE_TOKENS,
    replay: Replay | None = None,
    platform: str = "cpu",
) -> StoreSize:
    """Fits the store into `memory` bytes.

    A running sequence needs 1 + K slots of its own, and 1 + K more unless `mode` is none, because the step in flight
    may contain the end of a state block, whose slot is then published. With `replay`, each sequence needs an anchor and
    a tail, and some sequences need a spare at a time. Pages may reach 2(1 + K) tokens past `max_model_len`: the step in
    flight and the step being planned both need room for all their drafts.

    `platform` determines the default page size.

    The remaining memory is divided so that pages and checkpoints cover the same number of tokens, up to `most_tokens`.

    Raises:
        ConfigError: not even one sequence fits.
    """
    notices: list[str] = []
    page_size = config.page_size_on(platform)
    slot_bytes = shape.bytes_per_slot(dtype, config.ssm_dtype, debug_state=config.debug_state)
    # Each device of n members has the bytes of one in n pages.
    members = config.context_parallel_size
    whole_page = shape.bytes_per_page(page_size, config.kv_dtype(dtype))
    page_bytes = -(-whole_page // members)
    given_pages = config.num_pages and -(-config.num_pages // members) * members
    width = 1 + config.num_speculative_tokens
    memory -= config.max_initial_states * slot_bytes
    tail_bytes = 0
    if replay is not None:
        tail_bytes = shape.bytes_per_tail(dtype, config.ssm_dtype, replay, debug_state=config.debug_state)
        memory -= tail_bytes  # the null tail

    def slots_of(rows: int) -> int:
        if replay is not None:
            return rows + spares(rows, replay)
        return rows * (width if mode == "none" else 2 * width)

    def bytes_of(rows: int) -> int:
        return slots_of(rows) * slot_bytes + rows * tail_bytes

    max_len = max_model_len(config, model_max_len)
    seqs = config.max_num_seqs

    def pages_for(tokens: int) -> int:
        return -(-(tokens + 2 * width) // (page_size * members)) * members if page_bytes else 0

    def bytes_for(tokens: int) -> int:
        """The smallest store for one sequence, with the null slot and the null page."""
        null = (1 + config.max_initial_states) * slot_bytes + tail_bytes + whole_page
        return null + bytes_of(1) + pages_for(tokens) * page_bytes

    def too_small() -> StoreTooSmallError:
        pages = f" and pages of {show_bytes(whole_page)} for {page_size} tokens" if page_bytes else ""
        return StoreTooSmallError(
            f"{show_bytes(memory)} of memory is too small for one sequence: a state slot takes "
            f"{show_bytes(slot_bytes)}{pages} (raise memory_utilization, or lower num_speculative_tokens)",
            bytes_for(min(max_len, config.state_block_size)),
        )

    # One sequence must fit.
    if config.num_pages is None and page_bytes:
        room = memory - slot_bytes - bytes_of(1) - whole_page
        fits = max(room, 0) // page_bytes // members * members * page_size - 2 * width
        if fits < min(max_len, config.state_block_size):
            raise too_small()
        if fits < max_len:
            if config.max_model_len is not None:
                raise StoreTooSmallError(
                    f"max_model_len {max_len:,} does not fit: {show_bytes(memory)} hold pages for {fits:,} tokens "
                    "(lower max_model_len or raise memory_utilization)",
                    bytes_for(max_len),
                )
            notices.append(f"max_model_len is {fits:,} instead of {max_len:,}: more pages do not fit")
            max_len = fits
    elif given_pages is not None and page_bytes:
        fits = given_pages * page_size - 2 * width
        if fits < 2:
            raise ConfigError(
                f"num_pages={config.num_pages} cannot hold one sequence: at least {pages_for(2)} are needed"
            )
        if fits < max_len:
            notices.append(f"max_model_len is {fits:,} instead of {max_len:,}: {given_pages} pages hold no more")
            max_len = fits

    if config.num_slots is not None:
        most_seqs = _most(seqs, config.num_slots, slots_of)
        if not most_seqs:
            raise ConfigError(
                f"num_slots={config.num_slots} cannot hold one sequence: at least {slots_of(1)} are needed"
            )
    else:
        room = memory - pages_for(max_len) * page_bytes - whole_page - slot_bytes
        # If memory is scarce, half of it is for slots of running sequences; the rest is for their pages and for reuse.
        most_seqs = _most(seqs, max(room // 2, min(room, bytes_of(1))), bytes_of)
        if not most_seqs:
            raise too_small()
    if seqs > most_seqs:
        notices.append(f"max_num_seqs is {most_seqs} instead of {seqs}: more state slots do not fit")
        seqs = most_seqs

    private = slots_of(seqs)
    left = memory - slot_bytes - bytes_of(seqs) - whole_page
    per_token = page_bytes / page_size + (slot_bytes / config.state_block_size if mode != "none" else 0)
    tokens = int(max(left, 0) / per_token) if per_token else 0
    usable = seqs * (max_len + 2 * width) if mode == "none" else most_tokens  # no state outlives its request
    tokens = max(min(tokens, most_tokens, usable), max_len + 2 * width)
    if config.num_pages is not None or not page_bytes:
        pages = given_pages or 0
    else:
        # States are far larger than pages. Pages get at least a third, unless running sequences cannot fill that.
        running = min(pages_for(seqs * max_len), pages_for(most_tokens), left // 3 // page_bytes)
        pages = max(tokens // page_size, running, pages_for(max_len)) // members * members
    reusable = 0 if mode == "none" else max(tokens // config.state_block_size, 1)
    if config.num_pages is None:
        reusable = min(reusable, max((left - pages * page_bytes) // slot_bytes, 0))
    slots = config.num_slots if config.num_slots is not None else private + reusable
    return StoreSize(
        num_slots=1 + slots,
        num_pages=members + pages if page_bytes else 0,
        max_num_seqs=seqs,
        max_model_len=max_len,
        pages_per_row=pages_for(max_len),
        running_slots=private,
        bytes_per_slot=slot_bytes,
        bytes_per_page=whole_page,
        page_size=page_size,
        state_block_size=config.state_block_size,
        mode=mode,
        notices=tuple(notices),
        replay_interval=1 if replay is None else replay.interval,
        bytes_per_tail=tail_bytes,
        initial_states=config.max_initial_states,
        members=members,
    )


def places_of_parts(config: EngineConfig, tokens: int, heads: int, prefill_rows: int) -> int:
    """Returns for how many queries a device holds results of attention to divided pages, in float32.

    In decoding and in steps that are not divided by tokens, those of all members for each query, its own, their
    logarithms and what they are merged into. In divided steps, its own for all queries, and as many before and after
    they are exchanged. Queries of prefill fill whole tiles.
    """
    members = config.context_parallel_size
    if members == 1:
        return 0

    def places(tokens: int, rows: int) -> int:
        return (-(-tokens // config.tile_size) + rows) * config.tile_size

    if shares_of(tokens, members) == 1:
        return (members + 3) * (heads + places(tokens, prefill_rows))
    whole = min(tokens, LEAST_TOKENS * members)
    # Steps of few tokens have a row for 16 of them at most (`prefill_buckets`).
    few = heads + places(whole, min(prefill_rows, max(2, whole // 16)))
    return max(3 * places(tokens, prefill_rows), (members + 3) * few)


def max_model_len(config: EngineConfig, model_max_len: int | None) -> int:
    """Returns the maximum length that the flags ask for. `model_max_len`: the model's own.

    Raises:
        ConfigError: it exceeds the model's own, which the flags do not allow.
    """
    if config.max_model_len is None:
        return model_max_len or 8192
    if not config.allow_long_max_model_len and config.max_model_len > (model_max_len or config.max_model_len):
        raise ConfigError(
            f"max_model_len {config.max_model_len:,} exceeds the model's own {model_max_len:,} tokens; raise that "
            "limit by rope scaling or max_position_embeddings in --hf-overrides, or give --allow-long-max-model-len"
        )
    return config.max_model_len


def _most(rows: int, budget: int, cost: Callable[[int], int]) -> int:
    """Returns the largest number of rows, up to `rows`, with a cost within the budget. The cost must increase."""
    return bisect_right(range(1, rows + 1), budget, key=cost)
