"""Counters: plain integers that only grow, for metrics and reports. A field says how the server exports it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from serving.core.errors import FinishReason, MissReason


class Exported(NamedTuple):
    """How the server exports a counter."""

    name: str
    """Name of the metric; several fields of one metric have different `value`s."""
    text: str
    labels: tuple[str, ...] = ()
    """Labels of a dictionary's keys, of the places of a list (from 1), or of `value`."""
    value: str = ""


def exported(name: str, text: str, *labels: str, value: str = "", kind: Callable[[], Any] = int) -> Any:
    """Returns a field that the server exports; see `Exported`. `kind` makes its first value: 0, or an empty one."""
    return field(default_factory=kind, metadata={Exported: Exported(name, text, labels, value)})


@dataclass(slots=True)
class Stats:
    """Counters of the scheduler's decisions."""

    steps: int = 0
    requests: int = 0
    refused: int = exported("requests_refused", "Requests refused because the queue was full.")
    finished: Counter[FinishReason] = exported(
        "requests_finished", "Finished requests (each choice counts) by finish reason.", "reason", kind=Counter
    )
    preemptions: int = exported("preemptions", "Requests returned to the queue for lack of memory.")
    displacements: int = 0
    """Preemptions for a request that had no row while another had several."""
    resets: int = 0
    weight_changes: int = 0
    withdrawn: int = 0
    prompt_tokens: int = exported("prompt_tokens", "Prompt tokens of admitted requests.")
    """Of the first admission of each."""
    cached_tokens: int = exported("cached_prompt_tokens", "Prompt tokens that the prefix cache saved.")
    stateless_tokens: int = exported(
        "prompt_tokens_without_state",
        "Prompt tokens with cached keys and values that were computed again, because no state was cached there.",
    )
    prefixes_changed: int = exported(
        "prefixes_changed", "Conversations with most messages of an earlier one, but not from the first on."
    )
    full_hits: int = exported("full_prefix_hits", "Requests whose whole prompt was cached.")
    prefill_tokens: int = exported("prefill_tokens", "Tokens computed by prefill.")
    """Tokens fed that were certain beforehand: prompts, and outputs computed again after a preemption."""
    decode_tokens: int = 0
    """Tokens fed by decode rows, without drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    output_tokens: int = exported("generation_tokens", "Output tokens.")
    misses: Counter[MissReason] = exported(
        "prefix_misses", "Requests without a cached prefix, by reason.", "reason", kind=Counter
    )
    pages_published: int = 0
    pages_evicted: int = exported("pages_evicted", "Cached pages evicted.")
    states_published: int = exported("states_published", "States added to the prefix cache.")
    states_evicted: int = exported("states_evicted", "Cached states evicted.")
    boundaries_not_kept: int = 0
    """Checkpoints not published because no slot or page could be spared."""
    anchors: int = exported("anchors", "Under replay: states that decoding sequences wrote and continued from.")
    drafts_cut: int = 0
    """Drafts not fed because there were too few slots."""
    page_copies: int = 0
    rows_stalled: int = 0
    """Times a row sat out a step because a slot, a page or room in the step was missing."""

    def snapshot(self) -> dict[str, Any]:
        """All counters as a dictionary; the keys of the counted reasons are their names in lower case."""
        flat = asdict(self)
        for name in ("finished", "misses"):
            flat[name] = {reason.name.lower(): count for reason, count in getattr(self, name).items()}
        return flat
