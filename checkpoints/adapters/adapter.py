"""Adapters: LoRA as PEFT saves it (adapter_config.json, adapter_model.safetensors), a learned initial state, or both.

See `checkpoints.adapters.initial_state` for the file of the latter.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from checkpoints.adapters.adapter_config import CONFIG_FILE, MERGE, AdapterConfig
from checkpoints.adapters.initial_state import INITIAL_STATE_FILE, InitialState, digest_of, read_initial_state
from checkpoints.errors import CheckpointError, one_line
from checkpoints.json_file import MOST_JSON, read_json
from checkpoints.quantized.parameters import own_rows
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.adapters import TABLES, Target, targets
from mamba_jax.config import HybridConfig
from mamba_jax.families import TEXT_PREFIXES, weight_names
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel

WEIGHTS_FILE = "adapter_model.safetensors"

MODULE_PREFIX = "base_model.model."
"""The prefix of modules' names in the files."""
_TENSOR = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<part>[AB])(?:\.default)?\.weight|magnitude_vector(?:\.default)?(?:\.weight)?)"
)
_WHOLE = re.compile(r"(?P<module>.+?)(?:\.modules_to_save(?:\.default)?)?\.weight")
"""A module that was trained as a whole, as PEFT saves it or as it names it while it trains."""
_FUSED = ("qkv", "qkvz", "ba")
"""Fused projections of delta nets: a letter for each of the layers that they are here."""
_PREFIXES = ("", *TEXT_PREFIXES)
_FLOATS = ("F32", "F16", "BF16")
_MOST_MESSAGE = 500


@dataclass(frozen=True)
class Contents:
    """What an adapter has, without its numbers."""

    layers: Collection[str] = ()
    """Dotted paths of what LoRA matrices change."""
    magnitudes: bool = False
    tables: Collection[str] = ()
    initial_state: bool = False


Check = Callable[[Contents], None]


@dataclass(frozen=True)
class Adapter:
    """An adapter, for one model: LoRA matrices, a learned initial state, or both."""

    layers: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """A [rank, inputs] and B [outputs, rank] in float32, by the dotted path of each adapted dense layer. B includes the
    scale. Routed experts have one pair for each of their weights, [experts, rank, inputs] and [experts, outputs, rank],
    with zeros for experts that are not adapted. Empty without LoRA."""
    rank: int
    """The largest of the modules' ranks; 0 without LoRA."""
    digest: str
    """A digest of all numbers of the layers and the initial state: adapters with equal digests are equal."""
    base: str | None
    """`base_model_name_or_path` of the config."""
    initial_state: InitialState | None = None
    """The state that requests start from instead of zeros."""
    magnitudes: Mapping[str, np.ndarray] = field(default_factory=dict)
    """DoRA: of each output [outputs] of the adapted dense layers, in float32: the norm of its row of W + B A."""
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The embedding (`embed`) and the head (`lm_head`) that replace the model's, [vocab, hidden] in float32."""

    @property
    def num_parameters(self) -> int:
        """Numbers in A, B, the magnitudes, the tables and the initial state."""
        state = 0 if self.initial_state is None else self.initial_state.num_parameters
        whole = (*self.magnitudes.values(), *self.tables.values())
        return state + sum(value.size for value in whole) + sum(a.size + b.size for a, b in self.layers.values())


def read_adapter(
    path: str | Path, config: HybridConfig, *, max_rank: int | None = None, check: Check = lambda contents: None
) -> Adapter:
    """Reads an adapter.

    Args:
        path: a directory that PEFT has saved, that has an `initial_state.safetensors`, or both.
        config: of the base model.
        max_rank: the highest rank that is accepted.
        check: called before any number is read. What it raises becomes a `CheckpointError`.
    Raises:
        CheckpointError: the directory cannot be read or requests something unsupported, a tensor belongs to no dense
            layer or routed expert of the model or has a wrong shape, or a number is not finite.
    """
    try:
        return _read(Path(path).expanduser(), config, max_rank, check)
    except Exception as error:  # whatever a file can cause that was made to do harm
        if isinstance(error, CheckpointError):
            raise CheckpointError(one_line(error, _MOST_MESSAGE)) from error
        where = one_line(path, _MOST_MESSAGE // 2)
        raise CheckpointError(f"{where}: not a usable adapter ({type(error).__name__}: {one_line(error)})") from error


def _read(folder: Path, config: HybridConfig, max_rank: int | None, check: Check) -> Adapter:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a directory; an adapter is a directory with {CONFIG_FILE} or {INITIAL_STATE_FILE}"
        )
    if not os.path.lexists(folder / INITIAL_STATE_FILE):
        return _read_lora(folder, config, max_rank, check)
    if not any(os.path.lexists(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)):
        check(Contents(initial_state=True))
        state = read_initial_state(folder, config)
        return Adapter({}, 0, hashlib.sha256(f"initial state {state.digest}".encode()).hexdigest(), None, state)
    lora = _read_lora(folder, config, max_rank, lambda contents: check(replace(contents, initial_state=True)))
    state = read_initial_state(folder, config)
    digest = hashlib.sha256(f"{lora.digest} and initial state {state.digest}".encode()).hexdigest()
    return replace(lora, digest=digest, initial_state=state)


def _read_lora(folder: Path, config: HybridConfig, max_rank: int | None, check: Check) -> Adapter:
    scales = AdapterConfig(folder, read_json(folder / CONFIG_FILE))
    file = folder / WEIGHTS_FILE
    if not os.path.lexists(file):
        raise CheckpointError(f"{folder}: has no {WEIGHTS_FILE}; other formats of weights are not supported")
    stored = SafetensorsFile(file, MOST_JSON)
    known = _targets_of(config)
    layers: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    magnitudes: dict[str, np.ndarray] = {}
    experts: dict[str, dict[_Place, tuple[np.ndarray, np.ndarray]]] = {}
    # All names, shapes and ranks are checked before a number is read, so that the model bounds what is read.
    checked = []
    found = known.tables(stored)
    scales.check_whole([module for module, _ in found.values()])
    if scales.tied and config.tie_word_embeddings and len(found) == 1:
        found = dict.fromkeys(TABLES, *found.values())  # PEFT keeps the tables of a tied model one
    for module, names in sorted(_pairs(stored, {name for _, name in found.values()}).items()):
        pair = _Pair(file, module, *(stored.entries[names[part]].shape for part in "AB"))
        scale, rank = scales.of(module, pair.rank), pair.rank
        if max_rank is not None and rank > max_rank:
            raise CheckpointError(f"{file}: {module} has rank {rank}, more than max_lora_rank {max_rank}")
        place, parts = known.find_expert(pair), known.find(pair)
        _check_magnitude(stored, pair, names.get("M"), wanted=scales.magnitudes, of_expert=place is not None)
        checked.append((pair, names, scale, place, parts))
    changed = {path for *_, place, parts in checked for path in ([place.path] if place else dict(parts))}
    check(Contents(changed, scales.magnitudes, found))
    for pair, names, scale, place, parts in checked:
        a, b, *magnitude = (stored.copy(names[part]).astype(np.float32) for part in sorted(names))
        with np.errstate(over="ignore", invalid="ignore"):
            b *= np.float32(scale)
        if not all(np.isfinite(each).all() for each in (a, b, *magnitude)):
            raise CheckpointError(f"{file}: {pair.module} has numbers that are not finite, or not after its scale")
        if place is not None:
            pieces = experts.setdefault(place.path, {})
            if place in pieces:
                raise CheckpointError(f"{file}: {pair.module} comes twice, under two prefixes")
            pieces[place] = a, b
        for layer, rows in parts:
            own = (a, b[rows], *(each[rows] for each in magnitude))
            before = (
                *layers.setdefault(layer, (a, b[rows])),
                *(magnitudes.setdefault(layer, each) for each in own[2:]),
            )
            if not all(map(np.array_equal, before, own)):
                raise CheckpointError(
                    f"{file}: {pair.module} and another module are one shared layer of the model, with different "
                    "adapters: an adapter for each use of a shared layer is not supported"
                )
    rank = max(pair.rank for pair, *_ in checked)
    for path, pieces in experts.items():
        layers[path] = _stacked(known.targets[path], pieces)
    parts_of = {layer: dict(zip("AB", pair, strict=True)) for layer, pair in layers.items()}
    for layer, value in magnitudes.items():
        parts_of[layer]["M"] = value
    tables = {table: stored.copy(name).astype(np.float32) for table, (_, name) in found.items()}
    for table, value in tables.items():
        if not np.isfinite(value).all():
            raise CheckpointError(f"{file}: {found[table][1]} has numbers that are not finite")
        parts_of[table] = {"": value}
    return Adapter(layers, rank, digest_of(parts_of), scales.base, magnitudes=magnitudes, tables=tables)


def _check_magnitude(stored: SafetensorsFile, pair: _Pair, name: str | None, *, wanted: bool, of_expert: bool) -> None:
    """Raises `CheckpointError` unless a module has magnitudes of its outputs just where the config says so."""
    shape, what = None if name is None else stored.entries[name].shape, f"{pair.file}: {pair.module}"
    if wanted and of_expert:
        raise CheckpointError(f"{what}: magnitudes (DoRA) of routed experts are not supported{MERGE}")
    if shape != ((pair.b[0],) if wanted else None):
        found = "no magnitudes" if shape is None else f"magnitudes {list(shape)}"
        raise CheckpointError(f"{what} has {found}: expected {[pair.b[0]] if wanted else 'none without use_dora'}")


@dataclass(frozen=True)
class _Pair:
    """The shapes of A and B of a module, [rank, inputs] and [outputs, rank]."""

    file: Path
    module: str
    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.a[0]

    def check(self, outputs: int, inputs: int) -> None:
        """Raises `CheckpointError` if the shapes are not those of a layer with so many outputs and inputs."""
        if self.a[1] != inputs or self.b != (outputs, self.rank):
            raise CheckpointError(
                f"{self.file}: {self.module} has lora_A {list(self.a)} and lora_B {list(self.b)}: "
                f"expected [{self.rank}, {inputs}] and [{outputs}, {self.rank}]"
            )


@dataclass(frozen=True)
class _Place:
    """One projection of one routed expert."""

    path: str
    """The weight of all experts."""
    expert: int
    part: int
    """Of gate and up: 0 or 1. Otherwise 0."""


def _stacked(target: Target, pieces: Mapping[_Place, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns A and B of all experts. The projections of a weight have rows of A, and columns of B, of their own."""
    rank = max(len(a) for a, _ in pieces.values())
    shape_a, shape_b = target.shapes(rank * target.ranks)
    stacked_a, stacked_b = np.zeros(shape_a, np.float32), np.zeros(shape_b, np.float32)
    for place, (a, b) in pieces.items():
        start, outputs = place.part * rank, place.part * len(b)
        stacked_a[place.expert, start : start + len(a)] = a
        stacked_b[place.expert, outputs : outputs + len(b), start : start + len(a)] = b
    return stacked_a, stacked_b


def _pairs(file: SafetensorsFile, tables: Collection[str]) -> dict[str, dict[str, str]]:
    """Returns the names of A and B of each adapted module, by the module's name in the base model.

    `tables`: names of tensors that are no matrices of LoRA.
    """
    found: dict[str, dict[str, str]] = {}
    for name, entry in file.entries.items():
        if name in tables:
            continue
        match = _TENSOR.fullmatch(name.removeprefix(MODULE_PREFIX))
        if match is None:
            raise CheckpointError(f"{file.path}: tensor {name} is not supported: expected *.lora_A.weight or lora_B")
        parts, part = found.setdefault(match["module"], {}), match["part"] or "M"
        axes = 1 if part == "M" else 2
        if entry.dtype not in _FLOATS or len(entry.shape) != axes:
            expected = f"{axes} axes of {', '.join(_FLOATS)}"
            raise CheckpointError(f"{file.path}: {name} is {entry.dtype} {list(entry.shape)}: expected {expected}")
        if part in parts:
            raise CheckpointError(f"{file.path}: {name} comes twice")
        parts[part] = name
    if not found:
        raise CheckpointError(f"{file.path}: has no tensors of LoRA")
    for module, parts in found.items():
        if missing := {"A", "B"} - parts.keys():
            raise CheckpointError(f"{file.path}: {module} has no lora_{min(missing)}: A and B are needed")
    return found


class _Targets:
    """The dense layers and routed experts of a model, by the names of modules in its Hugging Face checkpoints."""

    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self.targets = targets(HybridModel.abstract(config), experts=True)
        self._names: dict[str, list[tuple[str, HFSource]]] = {}
        for path, source in weight_names(config).items():
            for each in (source, *source.alternatives):
                for name in each.names:
                    self._names.setdefault(name, []).append((path, each))

    def tables(self, file: SafetensorsFile) -> dict[str, tuple[str, str]]:
        """The module and the tensor of each table in a file: of `embed` and `lm_head`, which replace the model's."""
        found: dict[str, tuple[str, str]] = {}
        shape = self._config.vocab_size, self._config.hidden_size
        for name, entry in file.entries.items():
            if (match := _WHOLE.fullmatch(name.removeprefix(MODULE_PREFIX))) is None:
                continue
            module = match["module"]
            if any(path == "embed.weight" for path, _ in self._of(module)):
                table = "embed"
            elif module in (f"{prefix}lm_head" for prefix in _PREFIXES):
                table = "lm_head"
            else:
                continue
            if table in found:
                raise CheckpointError(f"{file.path}: {found[table][1]} and {name} are both the {table}")
            if entry.dtype not in _FLOATS or entry.shape != shape:
                raise CheckpointError(
                    f"{file.path}: {name} is {entry.dtype} {list(entry.shape)}: expected one {table} of {list(shape)} "
                    f"in {', '.join(_FLOATS)}; an adapter cannot add tokens"
                )
            found[table] = module, name
        return found

    def find(self, pair: _Pair) -> list[tuple[str, np.ndarray]]:
        """The model's layers that a module consists of, and the rows of B that belong to each. None for an expert's."""
        if self.find_expert(pair) is not None:
            return []
        sources = self._of(pair.module)
        if not sources:
            return self._parts(pair)
        found = []
        for path, source in sources:
            layer = path.removesuffix(".weight")
            target = self.targets.get(layer)
            if target is None or target.lead or source.stack or source.cuts:
                raise CheckpointError(f"{pair.file}: {pair.module} is not a linear layer that adapters can change here")
            stored = source.stored((math.prod(target.outputs), target.inputs))
            pair.check(stored[0], target.inputs)
            found.append((layer, stored_rows(source, stored[0])))
        return found

    def _parts(self, pair: _Pair) -> list[tuple[str, np.ndarray]]:
        """As `find`, for a part of a delta net's fused projection: `in_proj_q`, or `in_proj_qkv` of `in_proj_qkvz`."""
        parent, _, letters = pair.module.rpartition(".in_proj_")
        names = [f"{parent.removeprefix(prefix)}.in_proj_{fused}.weight" for prefix in _PREFIXES for fused in _FUSED]
        layers = {path.removesuffix("_proj.weight")[-1]: path.removesuffix(".weight")
                  for name in names for path, _ in self._names.get(name, ())}  # fmt: skip
        if not letters or len(set(letters)) < len(letters) or not set(letters) <= set(layers):
            raise CheckpointError(f"{pair.file}: the model has no module {pair.module}")
        found, outputs = [], 0
        for letter in letters:
            target = self.targets[layers[letter]]
            rows = outputs + np.arange(math.prod(target.outputs))
            found.append((layers[letter], rows))
            outputs += len(rows)
        pair.check(outputs, target.inputs)
        return found

    def find_expert(self, pair: _Pair) -> _Place | None:
        """The projection of a routed expert that a module is; None if it is none."""
        for path, source in self._of(pair.module):
            target = self.targets.get(path)
            if target is None or not target.lead or len(source.names) != target.lead[0] * target.ranks:
                continue
            pair.check(math.prod(target.outputs) // target.ranks, target.inputs)
            expert, part = divmod(source.names.index(f"{self._known(pair.module)}.weight"), target.ranks)
            return _Place(path, expert, part)
        return None

    def _of(self, module: str) -> list[tuple[str, HFSource]]:
        return self._names.get(f"{self._known(module)}.weight", [])

    def _known(self, module: str) -> str:
        """Returns the module's name in the model's own checkpoints; `module` itself if there is none."""
        names = (module.removeprefix(prefix) for prefix in _PREFIXES)
        return next((name for name in names if f"{name}.weight" in self._names), module)


_targets_of = lru_cache(maxsize=4)(_Targets)  # a trace of the model finds them


def stored_rows(source: HFSource, stored: int) -> np.ndarray:
    """Which of the `stored` rows of a tensor belong to a source, in its order."""
    return own_rows(source, np.arange(stored)).reshape(-1)
