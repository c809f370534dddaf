"""Changes of weights and adapters, on one engine or on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.tensors.replacement import NewWeights, repeatable
from serving.core.errors import RequestError
from serving.engine.control import WeightsChecksum
from serving.engine.engine import Engine
from serving.engine.requests.adapters import AdapterTable, ReadAdapter, Reservation

CallEach = Callable[[Callable[[Engine], Any]], list[Any]]
"""Calls a function with each engine between two of its steps; see `Engine.call_each`."""


def common_checksum(found: Sequence[WeightsChecksum]) -> WeightsChecksum:
    """Returns the checksum that all replicas have.

    Raises:
        RequestError: their weights differ.
    """
    if len({each.checksum for each in found}) > 1:
        versions = ", ".join(each.weights_version for each in found)
        raise RequestError(f"replicas have different weights (versions {versions}): send all weights again")
    return found[0]


@dataclass(frozen=True)
class WeightsUpdate:
    """New weights and the engines that need them."""

    weights: NewWeights
    version: str | int | None
    """The requested version. For several replicas without a requested version, the next number."""
    partial: bool
    lacking: Collection[Engine]
    """The engines to update. Engines that already have this version, for example after an update that failed on others,
    are omitted. If all engines have it, all are included, and they refuse the version."""

    @classmethod
    def of(
        cls, engines: Sequence[Engine], given: NewWeights, *, version: str | int | None = None, partial: bool = False
    ) -> WeightsUpdate:
        """Creates an update. The next version follows the replica with the most updates, because a replica that failed
        an update has fewer."""
        if len(engines) == 1:
            return cls(given, version, partial, engines)
        weights = [engine.control.weights for engine in engines]
        name = str(1 + max(each.updates for each in weights)) if version is None else str(version)
        lacking = [e for e, each in zip(engines, weights, strict=True) if each.version != name or not each.whole]
        return cls(repeatable(given), name, partial, lacking or engines)

    def apply(self, engine: Engine) -> str:
        """Updates an engine between two of its steps if it needs the weights. Returns the engine's version.

        Raises:
            RequestError: see `Control.update_weights`.
        """
        if engine in self.lacking:
            return engine.control.update_weights(self.weights, version=self.version, partial=self.partial)
        return engine.control.weights.version


def table_of(engine: Engine) -> AdapterTable:
    """Returns the adapters of an engine.

    Raises:
        RequestError: the engine serves none.
    """
    if engine.adapters is None:
        raise RequestError("adapters need the flag enable_lora or max_initial_states")
    return engine.adapters


def load_adapter(name: str, path: str, adapter: ReadAdapter, call_each: CallEach) -> None:
    """Loads or reloads an adapter, which was read from its files, on all engines.

    Raises:
        RequestError: it cannot be loaded on one of them. All engines keep the adapters that they have.
    """
    reserved: dict[Engine, Reservation] = {}

    def reserve(engine: Engine) -> None:
        reserved[engine] = table_of(engine).reserve(name, path, adapter)

    def cancel(engine: Engine) -> None:
        if (reservation := reserved.pop(engine, None)) is not None:
            table_of(engine).cancel(reservation)

    def remove(engine: Engine) -> None:
        cancel(engine)
        table_of(engine).remove(name)

    undo = cancel
    try:
        call_each(reserve)
        undo = remove  # entries that a failed write has changed cannot be kept
        call_each(lambda engine: table_of(engine).commit(reserved.pop(engine)))
    except BaseException:
        call_each(undo)
        raise
