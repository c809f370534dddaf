"""What a step still has room for while it is planned."""

from collections.abc import Iterator
from contextlib import contextmanager

from serving.core.config import SchedulerConfig


class Budget:
    """Tokens, tiles and rows left."""

    __slots__ = ("decode_rows", "prefill_rows", "share", "tiles", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens = config.max_num_batched_tokens
        self.tiles = config.tiles
        self.decode_rows = config.decode_rows
        self.prefill_rows = config.max_prefill_rows
        self.share = min(config.tile_size, config.max_num_batched_tokens)

    @contextmanager
    def half(self) -> Iterator[None]:
        """Within, only half of the tokens that are left can be used."""
        held = self.tokens - self.tokens // 2
        self.tokens -= held
        yield
        self.tokens += held

    def grant_share(self) -> None:
        """Let prefills have a tile's worth of tokens even if decoding took them all.

        So a step may feed that many more than its budget. Otherwise decoding rows that use the whole budget could
        hold up a prompt for as long as they run.
        """
        self.tokens = max(self.tokens, self.share)
