"""The model of the symbolic device, as a function of digests, and the plain greedy output of each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from serving.core.cache.content import Scope
from serving.core.requests.request import Request

_MASK = (1 << 61) - 1


def start_digest(scope: Scope) -> int:
    """The empty sequence. Salts differ as adapters do, and weights by their number: a hit across is a wrong state."""
    salt = 77 if scope.salt is None else 78 + sum(map(ord, scope.salt)) * 1009
    return salt + scope.weights * 0x5BD1E995


def absorb(digest: int, token: int) -> int:
    """The sequence with one token more."""
    return ((digest ^ (token + 3)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


@dataclass
class Model:
    """Which token follows. `eos` is one of the vocabulary, so that some outputs end early."""

    vocab: int = 6

    def next(self, digest: int) -> int:
        """The greedy token after a sequence."""
        return (digest >> 23) % self.vocab


class Truth:
    """A request's plain greedy sequence, as long as anybody asks for, and its digests."""

    def __init__(self, model: Model, prompt: Sequence[int], scope: Scope) -> None:
        self.model = model
        self.tokens = list(prompt)
        self.digests = list(accumulate(prompt, absorb, initial=start_digest(scope)))

    def reach(self, n: int) -> None:
        """Extend to n tokens."""
        while len(self.tokens) < n:
            token = self.model.next(self.digests[-1])
            self.tokens.append(token)
            self.digests.append(absorb(self.digests[-1], token))


class Violation(AssertionError):
    """The device was told to do something that a right scheduler never asks."""


def expect(condition: object, message: str, *values: object) -> None:
    """Raise `Violation` unless `condition`."""
    if not condition:
        raise Violation(message + "".join(f" {value}" for value in values))


def expected_output(truth: Truth, request: Request) -> list[int]:
    """Plain greedy decoding, one request at a time."""
    truth.reach(request.max_total)
    output: list[int] = []
    for token in truth.tokens[request.prompt_len : request.max_total]:
        output.append(token)
        if token in request.stop_token_ids and len(output) >= request.min_tokens:
            break
    return output
