"""What a step still has room for while it is planned."""

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

    def grant_share(self) -> None:
        """Let prefills have a tile's worth of tokens even if decoding took them all.

        So a step may feed that many more than its budget. Otherwise a full house of decoding rows could hold up a
        prompt for as long as there are such rows.
        """
        self.tokens = max(self.tokens, self.share)
