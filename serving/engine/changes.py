"""Changes of weights and adapters, on one engine or on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def weights_update(
    engines: Sequence[Engine], given: NewWeights, *, version: str | int | None = None, partial: bool = False
) -> Callable[[Engine], str]:
    """Returns a function that updates an engine between two of its steps if it needs the weights, and returns the
    engine's version. It raises the errors of `Control.update_weights`.

    For several replicas, the next version follows the replica with the most updates, because a replica that failed an
    update has fewer. Engines that already have the version, for example after an update that failed on others, are left
    as they are. If all engines have it, all are updated, and they refuse the version.
    """
    lacking: Sequence[Engine] = engines
    if len(engines) > 1:
        weights = [engine.control.weights for engine in engines]
        version = str(1 + max(each.updates for each in weights)) if version is None else str(version)
        stale = [e for e, each in zip(engines, weights, strict=True) if each.version != version or not each.whole]
        given, lacking = repeatable(given), stale or engines

    def update(engine: Engine) -> str:
        if engine in lacking:
            return engine.control.update_weights(given, version=version, partial=partial)
        return engine.control.weights.version

    return update


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
