"""Whether what an engine said is what plain greedy decoding says."""

import math
from collections import Counter

from tests.support.engines.engines import Continuation
from tests.support.engines.shared_engines import TOLERANCE, engines_of


class Divergence(AssertionError):
    """An output is not what plain greedy decoding gives."""


def judge(trace, ask, output) -> None:
    """Whether one request's output is what it should be. Raises `Divergence` where it is not."""
    where = f"seed {trace.seed} ({trace.model}, {trace.mode}, {trace.flags}), request {ask.name}"
    if not output.finished:
        raise Divergence(f"{where}: not finished")
    on = engines_of(trace.model)
    for choice, line in zip(output.outputs, ask.expected, strict=True):
        # Where answers may depend on what was reused, any draw may fall on the other side of a bound.
        tie = math.inf if on.tolerance > TOLERANCE and ask.params.temperature else on.tolerance
        same = compare(trace.met, choice, line, f"{where}, choice {choice.index}", on.tolerance, tie)
        if same and choice.finish_reason != "abort" and len(choice.token_ids) != ask.length:
            raise Divergence(f"{where}: {len(choice.token_ids)} tokens instead of {ask.length}")
    # An abort may leave part of it.
    if output.prompt_logprobs is not None and output.outputs[0].finish_reason != "abort":
        whole = on.whole(list(ask.prompt))
        trace.met["prompt_logprobs"] += 1
        for at, table in enumerate(output.prompt_logprobs[1:], start=1):
            token = ask.prompt[at]
            if table is None or not abs(table[token].logprob - whole[at - 1, token]) <= on.of_whole:
                raise Divergence(f"{where}: log-probability of prompt token {at}: {table}, not {whole[at - 1, token]}")


def compare(
    met: Counter, choice, line: Continuation, where: str, tolerance: float = TOLERANCE, tie: float = TOLERANCE
) -> bool:
    """Whether a choice says what the line says; False where a near-tie cut the comparison short.

    Log-probabilities may differ by `tolerance`. Where the reference's best two tokens are closer than `tie`, either may
    be chosen.

    Raises:
        Divergence: it says something else.
    """
    met["comparisons"] += 1
    for at, token in enumerate(choice.token_ids):
        met["tokens"] += 1
        if token != line.tokens[at]:
            if line.gaps[at] < tie:
                met["cut"] += 1
                return False
            raise Divergence(
                f"{where}: token {at} is {token}, not {line.tokens[at]} (gap {line.gaps[at]:.2g}): "
                f"{choice.token_ids} instead of {line.tokens}"
            )
        if choice.logprobs is None:
            continue
        said, right = {t: entry.logprob for t, entry in choice.logprobs[at].items()}, line.tables[at]
        if not abs(said[token] - line.logprobs[at]) <= tolerance:
            raise Divergence(f"{where}: log-probability of token {at} is {said[token]}, not {line.logprobs[at]}")
        # The alternatives are the right ones, as many as there are. (Near-ties may change places.)
        for other, logprob in said.items():
            if logprob < min(right.values()) - tolerance:
                raise Divergence(f"{where}: {other} ({logprob}) is not among {right}")
            if other in right and not abs(logprob - right[other]) <= tolerance:
                raise Divergence(f"{where}: log-probability of {other} is {logprob}, not {right[other]}")
        best, likeliest = sorted(said.values(), reverse=True)[:2], sorted(right.values(), reverse=True)
        if len(best) > 1 and any(abs(a - b) > tolerance for a, b in zip(best, likeliest, strict=False)):
            raise Divergence(f"{where}: the likeliest are {said}, not {right}")
    return True
