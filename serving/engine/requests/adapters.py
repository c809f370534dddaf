"""The loaded adapters of an engine (LoRA matrices, learned initial states or both), and the requests that use them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from checkpoints.adapters.adapter import Adapter, Contents, read_adapter
from checkpoints.errors import CheckpointError
from mamba_jax.adapters import AdapterEntry
from mamba_jax.config import HybridConfig
from mamba_jax.programs import StepPrograms
from serving.core.errors import RequestError
from serving.engine.requests.initial_states import InitialStates
from serving.state_transfer.source import Loop


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, with vLLM's fields."""

    lora_name: str
    """Requests with this name and path use the adapter that the first of them loaded."""
    lora_int_id: int
    """Not used. The engine distinguishes adapters by name, and their cached states by content."""
    lora_path: str
    """A directory with LoRA matrices as PEFT saves them, a learned initial state, or both."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter on the device: in one entry of the programs' adapters, one entry of the initial states, or both."""

    name: str
    path: str
    digest: str
    entry: int
    """0 without LoRA."""
    initial_slot: int
    """The slot that requests start from; 0 = zeros."""
    users: int = 0
    """Number of unfinished requests that use the adapter. Its entries are overwritten only if this is 0."""
    last_use: int = 0


class AdapterNotRead(RequestError):
    """A request's adapter is not on the device, and the engine's thread must not read files."""


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter that was read from its files, and its LoRA matrices as the device takes them."""

    adapter: Adapter
    matrices: AdapterEntry | None


@dataclass(slots=True, eq=False)
class Reservation:
    """The entries for an adapter that is about to be loaded. Ends with `AdapterTable.commit` or `cancel`."""

    adapter: ReadAdapter
    loading: LoadedAdapter
    state: int
    """Entry of the initial state; 0 without one."""
    displaced: list[tuple[_Entries, int, LoadedAdapter | None, bool]] = field(default_factory=list)
    """What each entry held before, and whether requests could name it."""


class AdapterNames(dict[str, tuple[str, str]]):
    """The path and the digest of every adapter that was loaded and not unloaded, by name.

    All replicas of an engine share it: an adapter that was removed from a device is read again only with the content
    that it had, and a replica that holds other content under a name loads the adapter again.
    """

    def digest(self, request: LoRARequest | None) -> str | None:
        """Returns the digest of a request's adapter; None if no engine has loaded it yet."""
        path, digest = (None, None) if request is None else self.get(request.lora_name, (None, None))
        return digest if request is not None and path == str(request.lora_path) else None

    def check(self, name: str) -> None:
        """Raises RequestError if no adapter has this name."""
        if name not in self:
            raise RequestError(f"adapter {name!r} is not loaded; loaded are: {', '.join(self) or 'none'}")


class AdapterTable:
    """Loads adapters into entries of the device. An entry is free when no unfinished request uses its adapter.

    Args:
        programs: step programs; LoRA needs programs with adapters.
        config: the base model's configuration.
        loop: has the store.
        initial_states: None refuses adapters with an initial state.
        names: shared by all replicas.
    """

    def __init__(
        self,
        programs: StepPrograms,
        config: HybridConfig,
        loop: Loop,
        initial_states: InitialStates | None,
        names: AdapterNames | None = None,
    ) -> None:
        self.names = AdapterNames() if names is None else names
        self._programs, self._config, self._loop, self._states = programs, config, loop, initial_states
        self._max_rank = None if programs.adapters is None else programs.adapters.rank
        self._loras = _Entries("max_loras", 0 if programs.adapters is None else programs.adapters.count)
        self._initial = _Entries("max_initial_states", 0 if initial_states is None else initial_states.count)
        self._named: dict[str, LoadedAdapter] = {}
        self.reads_files = True
        """Whether `take` may read files. False where other clients wait for the thread."""
        self._uses = itertools.count(1)

    @property
    def loaded(self) -> dict[str, str]:
        """The digest of each adapter that requests can name."""
        return {name: adapter.digest for name, adapter in self._named.items()}

    @property
    def usage(self) -> dict[str, int | str]:
        """The number of entries for LoRA adapters (`max`), and names of adapters that requests use (`running`)."""
        held = [adapter for entries in (self._loras, self._initial) for adapter in entries.held if adapter]
        return {"max": len(self._loras.held), "running": ",".join(sorted({each.name for each in held if each.users}))}

    def warm_up(self) -> None:
        """Compiles what loading needs."""
        if self._states is not None and self._loop.store is not None:
            self._states.warm_up(self._loop.store)

    def read(self, name: str, path: str | Path) -> ReadAdapter:
        """Reads an adapter's files. May be called from any thread.

        Raises:
            RequestError: the adapter cannot be read, does not fit the model or `max_rank`, or needs a flag that is not
                set.
        """
        try:
            adapter = read_adapter(path, self._config, max_rank=self._max_rank, check=partial(self._check, path))
        except CheckpointError as error:
            raise RequestError(f"adapter {name!r}: {error}") from None
        return self.checked(name, path, adapter)

    def checked(self, name: str, path: str | Path, adapter: Adapter) -> ReadAdapter:
        """Returns an adapter in the form that the device takes. May be called from any thread.

        Raises:
            RequestError: it has numbers that are not finite in the device's dtypes.
        """
        try:
            if self._states is not None and adapter.initial_state is not None:
                self._states.check(adapter.initial_state, self._loop.store)
            matrices = None
            if self._programs.adapters is not None and adapter.layers:
                matrices = self._programs.adapters.entry_of(adapter.layers, adapter.magnitudes, adapter.tables)
        except ValueError as error:
            raise RequestError(f"adapter {name!r}: {path} cannot be used: {error}") from None
        return ReadAdapter(adapter, matrices)

    def _check(self, path: str | Path, has: Contents) -> None:
        """Raises CheckpointError if an adapter needs a flag that is not set."""
        found = self._programs.adapters
        of_experts = set(has.layers) - set(found.layers if found else ())
        if has.layers and not self._loras.held:
            needs = "has LoRA matrices, which need the flag enable_lora"
        elif of_experts:
            needs = f"changes routed experts ({min(of_experts)}), which needs the flag lora_experts"
        elif has.magnitudes and not (found and found.magnitudes):
            needs = "has magnitudes (DoRA), which need the flag enable_dora"
        elif has.tables and found and not found.tables:
            needs = (
                f"has its own {' and '.join(sorted(has.tables))} (modules_to_save), which needs the flag "
                f"lora_tables ({found.table_bytes:,} bytes for max_loras {found.count})"
            )
        elif has.initial_state and self._states is None:
            needs = "has a learned initial state, which needs the flag max_initial_states"
        else:
            return
        raise CheckpointError(f"{path} {needs}")

    def reserve(self, name: str, path: str | Path, adapter: ReadAdapter) -> Reservation:
        """Takes the entries that an adapter needs. Nothing is written yet.

        If no entry is empty, the least recently used adapter without unfinished requests is removed.

        Raises:
            RequestError: all entries are in use. The table is unchanged.
        """
        content = adapter.adapter
        entry = self._loras.free(name, self._named) if content.layers else 0
        state = self._initial.free(name, self._named) if content.initial_state is not None else 0
        slot = self._states.slot(state) if self._states is not None and state else 0
        loading = LoadedAdapter(name, str(path), content.digest, entry=entry, initial_slot=slot)
        loading.users = 1  # so that no other adapter gets the entries
        made = Reservation(adapter, loading, state)
        for entries, place in ((self._loras, entry), (self._initial, state)):
            if place:
                held = entries.held[place - 1]
                named = held is not None and self._named.get(held.name) is held
                if held is not None and named:
                    del self._named[held.name]
                made.displaced.append((entries, place, held, named))
                entries.held[place - 1] = loading
        return made

    def commit(self, reserved: Reservation) -> LoadedAdapter:
        """Writes an adapter into its reserved entries, and replaces one with the same name. Requests can name it from
        now on; those that use the old one keep it until they end."""
        adapter, found = reserved.adapter, reserved.loading
        try:
            if found.entry:
                self._programs.replace_adapter(found.entry, adapter.matrices or adapter.adapter.layers)
            if reserved.state and self._states is not None and adapter.adapter.initial_state is not None:
                self._states.put(self._loop, reserved.state, adapter.adapter.initial_state)
        except BaseException:  # what the entries held is lost
            for entries, place, _, _ in reserved.displaced:
                entries.held[place - 1] = None
            raise
        found.users, found.last_use = 0, next(self._uses)
        before, self._named[found.name] = self._named.get(found.name), found
        self.names[found.name] = (found.path, found.digest)
        if before is not None:
            self._clear(before)
        return found

    def cancel(self, reserved: Reservation) -> None:
        """Gives the reserved entries back to the adapters that they hold."""
        for entries, place, held, named in reserved.displaced:
            entries.held[place - 1] = held
            if held is not None and named:
                self._named.setdefault(held.name, held)

    def remove(self, name: str) -> None:
        """Removes an adapter, if it is loaded. Requests that use it keep it until they end."""
        self.names.pop(name, None)
        if (removed := self._named.pop(name, None)) is not None:
            self._clear(removed)

    def _clear(self, adapter: LoadedAdapter) -> None:
        """Writes zeros into the entries of an adapter that no request uses or can name."""
        if adapter.users or self._named.get(adapter.name) is adapter:
            return
        for entries in (self._loras, self._initial):
            if adapter in entries.held:
                entries.held[entries.held.index(adapter)] = None
                if entries is self._loras:
                    self._programs.replace_adapter(adapter.entry, {})
                elif self._states is not None:
                    self._states.clear(self._loop, adapter.initial_slot)

    def take(self, request: LoRARequest, content: ReadAdapter | None = None) -> LoadedAdapter:
        """Returns the adapter of a new request, and loads it if necessary. Call `release` when the request ends.

        Args:
            request: names the adapter.
            content: what its files have, if they have been read.
        Raises:
            AdapterNotRead: `content` is needed.
            RequestError: see `read` and `reserve`.
        """
        found, expected = self.find(request), self.names.digest(request)
        if found is None:
            name, path = request.lora_name, str(request.lora_path)
            if content is None and not self.reads_files:
                raise AdapterNotRead(f"adapter {name!r} is not on the device")
            content = content or self.read(name, path)
            if expected is not None and content.adapter.digest != expected:
                raise RequestError(
                    f"adapter {name!r}: the files in {path} have changed since it was loaded; load the adapter again"
                )
            found = self.commit(self.reserve(name, path, content))
        found.users += 1
        found.last_use = next(self._uses)
        return found

    def find(self, request: LoRARequest) -> LoadedAdapter | None:
        """Returns a request's adapter if it is on the device, with the content that was loaded under its name."""
        found, expected = self._named.get(request.lora_name), self.names.digest(request)
        if found is None or found.path != str(request.lora_path):
            return None
        return None if expected is not None and found.digest != expected else found

    def release(self, adapter: LoadedAdapter) -> None:
        """Records that a request that called `take` has ended."""
        adapter.users -= 1
        self._clear(adapter)


class _Entries:
    """The adapters in the entries of one kind, from entry 1 on.

    Args:
        flag: the flag that sets the number of entries.
        count: the number of entries.
    """

    def __init__(self, flag: str, count: int) -> None:
        self._flag = flag
        self.held: list[LoadedAdapter | None] = [None] * count

    def free(self, name: str, named: Mapping[str, LoadedAdapter]) -> int:
        """Returns an entry that no unfinished request uses: an empty one, one of a removed adapter or of `name`, or the
        least recently used one.

        Raises:
            RequestError: all are in use.
        """

        def worth(entry: int) -> int:
            held = self.held[entry - 1]
            return 0 if held is None or named.get(held.name) is not held or held.name == name else held.last_use

        idle = [entry for entry, held in enumerate(self.held, 1) if held is None or not held.users]
        if not idle:
            raise RequestError(
                f"adapter {name!r} cannot be loaded: unfinished requests use all {len(self.held)} loaded adapters; "
                f"try again, or raise {self._flag}",
                retry=True,
            )
        return min(idle, key=worth)
