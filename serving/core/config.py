"""The scheduler's settings. The constructor validates them; the rest of `serving.core` relies on these checks."""

from dataclasses import dataclass
from typing import Literal

from serving.core.errors import ConfigError

CacheMode = Literal["none", "align", "all"]

_POSITIVE = (
    "max_num_seqs", "max_num_batched_tokens", "page_size", "state_block_size", "tile_size", "replay_interval",
    "max_prefill_rows", "max_tiles", "context_members",
)  # fmt: skip
_NOT_NEGATIVE = ("num_speculative_tokens", "num_lookahead_tokens", "max_waiting", "num_pages")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes and limits. `num_slots` and `num_pages` count the null one (index 0), as the store's arrays do.

    Raises `ConfigError`, one line, for a combination that cannot work.
    """

    num_slots: int
    num_pages: int
    """0 = the model has no attention: no pages, and everything else as usual. With several members, of all of them."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    """Tokens a step may feed, drafts included. Prefills get at least a tile's worth, however much decoding takes."""
    max_model_len: int = 4096
    """Prompt and output together."""
    page_size: int = 16
    state_block_size: int = 256
    """B: a checkpoint at every multiple of it."""
    tile_size: int = 128
    cache_mode: CacheMode = "all"
    num_speculative_tokens: int = 0
    """K: the most drafts a row can have in a step."""
    replay_interval: int = 1
    """R. 1 = a decoding row has a slot for the state after every token of a step (snapshots); more = it has an anchor,
    and a state at every multiple of R is computed again from the inputs since (replay)."""
    num_lookahead_tokens: int = 0
    """How far beyond a step's own tokens the device may write attention pages while it proposes drafts (MTP: K)."""
    max_prefill_rows: int = 8
    max_tiles: int | None = None
    """Tiles of one prefill step; None = enough for `max_num_batched_tokens` tokens in `max_prefill_rows` rows."""
    max_waiting: int | None = None
    """Maximum number of waiting requests; further ones are refused. None: no limit."""
    max_decode_pause: float | None = None
    """Seconds that a step with decode rows may spend on prompts, at a granularity of one tile. None: no limit."""
    chunks_end_at_blocks: bool = False
    """Whether no prefill chunk runs over a multiple of B, because running states are rounded there."""
    context_members: int = 1
    """Devices that the pages of a row are divided over by position; each has a null page of its own."""

    def __post_init__(self) -> None:
        for names, least in ((_POSITIVE, 1), (_NOT_NEGATIVE, 0)):
            for name in names:
                if (value := getattr(self, name)) is not None and value < least:
                    raise ConfigError(f"{name} is {value}: it must be at least {least}")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}: it must hold a prompt token and an output token")
        if self.cache_mode not in ("none", "align", "all"):
            raise ConfigError(f"cache mode is {self.cache_mode!r}: it must be none, align or all")
        check_sizes(
            self.state_block_size,
            tile_size=self.tile_size,
            page_size=self.page_size if self.num_pages else None,
            num_speculative_tokens=self.num_speculative_tokens,
            replay_interval=self.replay_interval,
        )
        if self.num_slots < 1 + self.slots_per_row:
            raise ConfigError(
                f"num_slots is {self.num_slots}: one sequence needs {self.slots_per_row}, and the null slot is one more"
            )
        if self.num_pages == 1:
            raise ConfigError("num_pages is 1: that is the null page alone; 0 says that the model has no attention")
        if self.num_pages % self.context_members or self.num_pages == self.context_members > 1:
            raise ConfigError(
                f"num_pages is {self.num_pages}: it must be a larger multiple of the {self.context_members} members"
            )

    @property
    def num_rows(self) -> int:
        """Sequences that run at once: `max_num_seqs`, limited by the number of slots."""
        return min(self.max_num_seqs, (self.num_slots - 1) // self.slots_per_row)

    @property
    def slots_per_row(self) -> int:
        """Slots of a row that decodes: with fewer it has to do with fewer drafts.

        Under replay one is enough to go on, and another is leased while a multiple of R is near.
        """
        return 1 if self.replay_interval > 1 else 1 + self.num_speculative_tokens

    @property
    def max_kept_states(self) -> int:
        """The most states that marks keep: half of the slots beyond those of running sequences."""
        return (self.num_slots - 1 - self.num_rows * self.slots_per_row) // 2

    @property
    def known_tokens_in_decode_row(self) -> int:
        """The most tokens of a prompt that a decode row may feed.

        A chunk of known tokens ends in a slot, so that it can be published, handed off and continued by prefill. Under
        replay decode steps write states at multiples of R alone: a row without tokens (a whole-prompt hit) is all that
        they may have of a prompt.
        """
        return 0 if self.replay_interval > 1 else 1 + self.num_speculative_tokens

    @property
    def tiles(self) -> int:
        """The most tiles of one prefill step."""
        if self.max_tiles is not None:
            return self.max_tiles
        # Each row may begin and end inside a tile: one tile more than its tokens fill, at worst.
        return -(-self.max_num_batched_tokens // self.tile_size) + self.max_prefill_rows

    @property
    def pages_per_row(self) -> int:
        """Width of the page table: the longest sequence plus the optimistic tokens of two steps."""
        if not self.num_pages:
            return 0
        tokens, members = self.max_model_len + 2 * (self.num_speculative_tokens + 1), self.context_members
        return -(-tokens // (self.page_size * members)) * members

    @property
    def usable_pages(self) -> int:
        """The most pages of one sequence: all but the null ones."""
        return max(self.num_pages - self.context_members, 0)

    @property
    def caching(self) -> bool:
        """Whether anything is published at all."""
        return self.cache_mode != "none"


def replay_intervals(num_speculative_tokens: int, *, tile_size: int) -> list[int]:
    """Every R > 1 that can work, ascending.

    R divides the tile size (and so B), for states at multiples of either to be reached by decoding too. It is at least
    two steps' tokens: while one step has not settled, the next must not reach a second multiple of R.
    """
    least = 2 * (1 + num_speculative_tokens)
    return [size for size in range(least, tile_size + 1) if tile_size % size == 0]


def check_sizes(
    state_block_size: int,
    *,
    tile_size: int,
    page_size: int | None,
    num_speculative_tokens: int,
    replay_interval: int,
) -> None:
    """Raises `ConfigError`, with a value that would do, for sizes that do not fit together. `page_size` None: any."""
    block = state_block_size
    if block % tile_size:
        nearest = -(-block // tile_size) * tile_size
        raise ConfigError(f"state_block_size {block} is not a multiple of tile_size {tile_size}; try {nearest}")
    if page_size is not None and block % page_size:
        below = max(size for size in range(1, min(page_size, block) + 1) if block % size == 0)
        raise ConfigError(f"page_size {page_size} does not divide state_block_size {block}; try {below}")
    if block < 1 + num_speculative_tokens:
        raise ConfigError(
            f"state_block_size {block} is less than 1 + num_speculative_tokens = {1 + num_speculative_tokens}: "
            "a step may cross only one block boundary"
        )
    allowed = replay_intervals(num_speculative_tokens, tile_size=tile_size)
    if replay_interval > 1 and replay_interval not in allowed:
        least = 2 * (1 + num_speculative_tokens)
        raise ConfigError(
            f"replay_interval is {replay_interval}: it must divide tile_size ({tile_size}) and be at least "
            f"2 * (1 + num_speculative_tokens) = {least}; allowed are {', '.join(map(str, [1, *allowed]))}"
        )
