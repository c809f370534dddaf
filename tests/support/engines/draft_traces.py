"""The traces that every source of drafts with keys and values goes through."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from mamba_jax.batch import DecodeBatch
from tests.support.fleets.step_host import DECODE_ROWS, PAGES_PER_ROW, Host


def check_draft_traces(host: Host, prompt: Sequence[int], check: Callable[..., None], *, steps: int = 1) -> None:
    """Prompts of 13 tokens in chunks, alone and packed; drafts right and wrong; a prompt's end found in the cache.

    `check(host, seat, tokens, table)` looks at the drafts for what follows `tokens`, whose last one has not been fed.
    """
    other = list(prompt[4:9])
    for seat in (1, 2, 3, 4):
        host.seat(seat)
    host.prefill({"row_id": 1, "tokens": prompt[:5], "write": 1, "sample": False})
    assert (np.asarray(host.rows.drafts) == -1).all()
    out = host.prefill(
        {"row_id": 1, "tokens": prompt[5:], "c": 5, "read": 1, "write": 2}, {"row_id": 2, "tokens": other, "write": 8}
    )
    rows = {1: [*prompt, int(out.tokens[0, 0])], 2: [*other, int(out.tokens[1, 0])]}
    for seat in rows:
        check(host, seat, rows[seat], host.table(seat - 1))
    # Row 3 samples from the cached end of the first prompt; its pages are copies.
    copies = host.table(2).copy()
    copies[:3] = host.table(0)[:3]
    # Row 4 goes on from the middle of it and does not sample.
    more = host.table(3).copy()
    more[:1] = host.table(0)[:1]
    out = host.decode(
        {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
        {"row_id": 2, "continues": True, "drafts": 2, "writes": [8, 9, 10]},
        {"row_id": 3, "c": 13, "read": 2, "tokens": [], "writes": [], "table": copies}
        | {"page_copy": (host.table(0)[3], copies[3])},
        {"row_id": 4, "c": 5, "read": 1, "tokens": prompt[5:7], "writes": [0, 7], "sample": False}
        | {"table": more, "page_copy": (host.table(0)[1], more[1])},
    )
    for seat in (1, 2):
        rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
    rows[3] = [*prompt, int(out.tokens[2, 0])]
    assert rows[3] == rows[1][:14]
    for seat, table in ((1, host.table(0)), (2, host.table(1)), (3, copies)):
        check(host, seat, rows[seat], table)
    assert (np.asarray(host.rows.drafts[4]) == -1).all()
    for _ in range(steps):
        out = host.decode(
            {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
            {"row_id": 2, "continues": True, "drafts": 3, "writes": [8, 9, 10, 11]},
        )
        for seat in (1, 2):
            rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
            check(host, seat, rows[seat], host.table(seat - 1))


def assert_updated_in_place(host: Host, drafts: int) -> None:
    """Pages of drafts are written K times in one program, and not copied once."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((host.store, host.rows)))
    batch = DecodeBatch.empty(rows=DECODE_ROWS, num_speculative_tokens=drafts, pages_per_row=PAGES_PER_ROW)
    memory = host.programs.program(host.store, host.rows, batch).memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 10
