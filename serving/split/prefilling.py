"""Requests to a prefill worker's engine for prompts that another worker continues."""

from __future__ import annotations

from collections.abc import Sequence

from serving.engine.requests.sampling_params import SamplingParams
from serving.split.prefill_side import Export, PrefillSide
from serving.split.wire import Handoff, Ticket

ONCE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Parameters of such a request. Its single token is discarded, because the decode side samples its own."""


def fed_tokens(prompt: Sequence[int], handoff: Handoff) -> list[int]:
    """Returns the tokens to compute.

    `recompute-last` omits the last token. It must do so before the prefix lookup, because a fully cached prompt has no
    token to omit afterwards. For a prompt of one token the result is empty, and there is no state to send.
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
    adapter_name: str | None = None,
) -> Ticket:
    """Returns the ticket for the decode side. `worker` is this worker's URL; `adapter_name`: the request's adapter."""
    return Ticket(
        id=export.id if export is not None else "",
        worker=worker,
        handoff=handoff,
        prompt_token_ids=list(prompt),
        position=len(fed_tokens(prompt, handoff)),
        cached_tokens=cached_tokens,
        lease=side.lease,
        manifest=side.worker.manifest.digest,
        salt=export.salt if export is not None else None,
        adapter=export.adapter if export is not None else None,
        adapter_name=adapter_name,
    )
