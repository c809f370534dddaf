"""Counters: plain integers that only grow, for metrics and reports."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.core.reasons import FinishReason, MissReason


@dataclass(slots=True)
class Stats:
    """Counters of the scheduler's decisions."""

    steps: int = 0
    requests: int = 0
    refused: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    preemptions: int = 0
    displacements: int = 0
    """Preemptions for a request that had no row while another had several."""
    resets: int = 0
    weight_changes: int = 0
    withdrawn: int = 0
    prompt_tokens: int = 0
    """Of admitted requests, the first admission of each."""
    cached_tokens: int = 0
    """Of those, how many did not have to be computed."""
    full_hits: int = 0
    """Admissions that had nothing left to compute."""
    prefill_tokens: int = 0
    """Tokens fed that were certain beforehand: prompts, and outputs computed again after a preemption."""
    decode_tokens: int = 0
    """Tokens fed by decode rows, without drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    output_tokens: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)
    pages_published: int = 0
    pages_evicted: int = 0
    states_published: int = 0
    states_evicted: int = 0
    boundaries_not_kept: int = 0
    """Checkpoints not published because no slot or page could be spared."""
    anchors: int = 0
    """With replay: number of times that a decode row has written a state and continued from it."""
    drafts_cut: int = 0
    """Drafts not fed because there were too few slots."""
    page_copies: int = 0
    rows_stalled: int = 0
    """Times a row sat out a step because a slot, a page or room in the step was missing."""

    def count_admission(self, prompt_len: int, num_cached_tokens: int, miss_reason: MissReason | None) -> None:
        """Counts the first admission of a request."""
        self.prompt_tokens += prompt_len
        self.cached_tokens += num_cached_tokens
        self.full_hits += num_cached_tokens == prompt_len
        if miss_reason is not None:
            self.misses[miss_reason] += 1

    def snapshot(self) -> dict[str, Any]:
        """All counters as a dictionary; the keys of the counted reasons are their names in lower case."""
        flat = asdict(self)
        flat["finished"] = {reason.name.lower(): count for reason, count in self.finished.items()}
        flat["misses"] = {reason.name.lower(): count for reason, count in self.misses.items()}
        return flat
