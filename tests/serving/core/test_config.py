"""Settings that cannot work are refused in one line that says what is allowed."""

from typing import Any

import pytest

from serving.core import ConfigError
from tests.serving.core.drive import small_config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state_block_size": 5}, "state_block_size is 5: it must be a multiple of tile_size"),
        ({"page_size": 3}, "page_size is 3: it must divide state_block_size"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens is 4: it must be below state_block_size"),
        ({"num_slots": 1}, "num_slots is 1"),
        ({"num_slots": 3, "num_speculative_tokens": 2}, "one sequence needs 3"),
        ({"num_pages": 1}, "null page alone"),
        ({"num_pages": -1}, "must not be negative"),
        ({"cache_mode": "some"}, "none, align or all"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_tiles": 0}, "max_tiles is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        small_config(**changes)
    assert "\n" not in str(refused.value)


def test_page_size_need_not_divide_without_attention() -> None:
    assert small_config(page_size=3, num_pages=0).pages_per_row == 0


def test_derived_sizes() -> None:
    config = small_config(num_slots=10, num_speculative_tokens=3, max_num_seqs=8)
    assert config.num_rows == 2
    assert config.decode_rows == 2
    # Wide enough for two unsettled steps beyond the longest sequence.
    assert config.pages_per_row == (64 + 2 * 4) // 2
    assert config.tiles == 32 + config.max_prefill_rows
    assert small_config(max_decode_rows=2).decode_rows == 2
