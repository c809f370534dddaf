"""Choosing an implementation: a named choice is strict, the automatic one falls back and reports why."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """The implementation asked for does not exist, or cannot run this call."""


def _always(*args: Any, **kwargs: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run an operation. `unsupported(*args, **kwargs)` tells why it cannot run a call, or gives None."""

    name: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = _always


def call(operation: str, candidates: Sequence[Implementation], name: str | None, *args: Any, **kwargs: Any) -> Any:
    """Runs `operation` by the implementation called `name`, or, for None, by the first of `candidates` that can.

    Raises:
        UnsupportedError: `name` is unknown or cannot run this call, or no candidate can.
    """
    if name is not None:
        chosen = next((c for c in candidates if c.name == name), None)
        if chosen is None:
            known = ", ".join(c.name for c in candidates)
            raise UnsupportedError(f"{operation}: no implementation is called {name!r}; there are: {known}")
        if reason := chosen.unsupported(*args, **kwargs):
            raise UnsupportedError(f"{operation}: {name} cannot run this call: {reason}")
        return chosen.run(*args, **kwargs)
    reasons: list[str] = []
    for candidate in candidates:
        reason = candidate.unsupported(*args, **kwargs)
        if reason is None:
            if reasons:
                _log.info("%s runs by %s (%s)", operation, candidate.name, "; ".join(reasons))
            return candidate.run(*args, **kwargs)
        reasons.append(f"not {candidate.name}: {reason}")
    raise UnsupportedError(f"{operation}: no implementation can run this call ({'; '.join(reasons)})")
