"""Loads an adapter on one engine or on all replicas: on each of them or on none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpoints.adapter import Adapter
from serving.engine.engine import Engine
from serving.engine.request_error import RequestError
from serving.engine.requests.adapters import AdapterTable, Reservation


def table_of(engine: Engine) -> AdapterTable:
    """Returns the adapters of an engine.

    Raises:
        RequestError: the engine serves none.
    """
    if engine.adapters is None:
        raise RequestError("adapters need the flag enable_lora or max_initial_states")
    return engine.adapters


class AdapterLoad:
    """An adapter to load. Call `reserve` with every engine, then `commit`; after an error, `cancel` or `remove`.

    Args:
        name: the name of the adapter in requests.
        path: its directory.
        adapter: the content of its files.
    """

    def __init__(self, name: str, path: str, adapter: Adapter) -> None:
        self.name, self.path, self.adapter = name, path, adapter
        self._reserved: dict[Engine, Reservation] = {}

    def apply(self, call_all: Callable[[Callable[[Engine], None]], Any]) -> None:
        """Loads the adapter on all engines of a caller that steps them itself. `call_all`: see `Engine.call_all`.

        Raises:
            RequestError: it cannot be loaded on one of them. All engines keep the adapters that they have.
        """
        try:
            call_all(self.reserve)
        except BaseException:
            call_all(self.cancel)
            raise
        try:
            call_all(self.commit)
        except BaseException:
            call_all(self.remove)
            raise

    def reserve(self, engine: Engine) -> None:
        """Takes the entries that the adapter needs on an engine.

        Raises:
            RequestError: unfinished requests use all entries.
        """
        self._reserved[engine] = table_of(engine).reserve(self.name, self.path, self.adapter)

    def commit(self, engine: Engine) -> None:
        """Writes the adapter to an engine."""
        table_of(engine).commit(self._reserved.pop(engine))

    def cancel(self, engine: Engine) -> None:
        """Gives back what `reserve` took, if it took anything. What the entries hold stays."""
        if (reserved := self._reserved.pop(engine, None)) is not None:
            table_of(engine).cancel(reserved)

    def remove(self, engine: Engine) -> None:
        """Removes the adapter from an engine after another one failed to write it."""
        self.cancel(engine)
        table_of(engine).remove(self.name)
