"""What a prefill worker's engine is asked for a prompt that another worker will go on from."""

from __future__ import annotations

from collections.abc import Sequence

from serving.engine.sampling_params import SamplingParams
from serving.split.prefill_side import Export, PrefillSide
from serving.split.wire import Handoff, Ticket

ONCE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Its one token is discarded: the decode side samples its own."""


def fed_tokens(prompt: Sequence[int], handoff: Handoff) -> list[int]:
    """The tokens to compute.

    For `recompute-last` the last one goes here, before any prefix is looked up: later, of a prompt that is cached whole
    there would be less than no token to compute. Of a single token nothing is left, and there is nothing to send.
    """
    return list(prompt[:-1] if handoff == "recompute-last" else prompt)


def ticket_of(
    side: PrefillSide,
    export: Export | None,
    prompt: Sequence[int],
    handoff: Handoff,
    *,
    worker: str,
    cached_tokens: int = 0,
) -> Ticket:
    """What the decode side needs to know. `worker` is where this one can be reached."""
    return Ticket(
        id=export.id if export is not None else "",
        worker=worker,
        handoff=handoff,
        prompt_token_ids=list(prompt),
        position=len(fed_tokens(prompt, handoff)),
        cached_tokens=cached_tokens,
        lease=side.lease,
        manifest=side.worker.manifest.digest,
    )
