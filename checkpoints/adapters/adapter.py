"""Adapters: LoRA as PEFT saves it (adapter_config.json, adapter_model.safetensors), a learned initial state, or both.

See `checkpoints.adapters.initial_state` for the file of the latter.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.adapters.initial_state import INITIAL_STATE_FILE, InitialState, digest_of, read_initial_state
from checkpoints.errors import CheckpointError, one_line
from checkpoints.json_file import MOST_JSON, read_json
from checkpoints.quantized.parameters import own_rows
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.adapters import Target, targets
from mamba_jax.config import HybridConfig
from mamba_jax.families import TEXT_PREFIXES, weight_names
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

MODULE_PREFIX = "base_model.model."
"""The prefix of modules' names in the files."""
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_FUSED = ("qkv", "qkvz", "ba")
"""Fused projections of delta nets: a letter for each of the layers that they are here."""
_PREFIXES = ("", *TEXT_PREFIXES)
_FLOATS = ("F32", "F16", "BF16")
_MOST_MESSAGE = 500
_ORDINARY_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""

_KNOWN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "target_parameters", "task_type", "use_rslora",
))  # fmt: skip
"""Fields of adapter_config.json that are read here, or that only select the tensors of the file."""
_EXPLAINED: Mapping[str, str] = {
    "use_dora": "magnitudes (DoRA) are",
    "modules_to_save": "modules that were trained as a whole are",
    "lora_bias": "biases of adapters are",
    "fan_in_fan_out": "transposed weights are",
}
"""Fields that must be unset, like every unknown field, and what they request."""
_MERGE = "; merge the adapter into the model's weights with PEFT's merge_and_unload"


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

    @property
    def num_parameters(self) -> int:
        """Numbers in A, B and the initial state."""
        state = 0 if self.initial_state is None else self.initial_state.num_parameters
        return state + sum(a.size + b.size for a, b in self.layers.values())


def read_adapter(path: str | Path, config: HybridConfig, *, max_rank: int | None = None) -> Adapter:
    """Reads an adapter.

    Args:
        path: a directory that PEFT has saved, that has an `initial_state.safetensors`, or both.
        config: of the base model.
        max_rank: the highest rank that is accepted.
    Raises:
        CheckpointError: the directory cannot be read or requests something unsupported, a tensor belongs to no dense
            layer or routed expert of the model or has a wrong shape, or a number is not finite.
    """
    try:
        return _read(Path(path).expanduser(), config, max_rank)
    except Exception as error:  # whatever a file can cause that was made to do harm
        if isinstance(error, CheckpointError):
            raise CheckpointError(one_line(error, _MOST_MESSAGE)) from error
        where = one_line(path, _MOST_MESSAGE // 2)
        raise CheckpointError(f"{where}: not a usable adapter ({type(error).__name__}: {one_line(error)})") from error


def _read(folder: Path, config: HybridConfig, max_rank: int | None) -> Adapter:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a directory; an adapter is a directory with {CONFIG_FILE} or {INITIAL_STATE_FILE}"
        )
    if not os.path.lexists(folder / INITIAL_STATE_FILE):
        return _read_lora(folder, config, max_rank)
    state = read_initial_state(folder, config)
    if not any(os.path.lexists(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)):
        return Adapter({}, 0, hashlib.sha256(f"initial state {state.digest}".encode()).hexdigest(), None, state)
    lora = _read_lora(folder, config, max_rank)
    digest = hashlib.sha256(f"{lora.digest} and initial state {state.digest}".encode()).hexdigest()
    return replace(lora, digest=digest, initial_state=state)


def _read_lora(folder: Path, config: HybridConfig, max_rank: int | None) -> Adapter:
    scales = _Scales(folder, read_json(folder / CONFIG_FILE))
    file = folder / WEIGHTS_FILE
    if not os.path.lexists(file):
        raise CheckpointError(f"{folder}: has no {WEIGHTS_FILE}; other formats of weights are not supported")
    stored = SafetensorsFile(file, MOST_JSON)
    known = _targets_of(config)
    layers: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    experts: dict[str, dict[_Place, tuple[np.ndarray, np.ndarray]]] = {}
    # All names, shapes and ranks are checked before a number is read, so that the model bounds what is read.
    checked = []
    for module, names in sorted(_pairs(stored).items()):
        pair = _Pair(file, module, *(stored.entries[names[part]].shape for part in "AB"))
        scale, rank = scales.of(module, pair.rank), pair.rank
        if max_rank is not None and rank > max_rank:
            raise CheckpointError(f"{file}: {module} has rank {rank}, more than max_lora_rank {max_rank}")
        checked.append((pair, names, scale, known.find_expert(pair), known.find(pair)))
    for pair, names, scale, place, parts in checked:
        a, b = (stored.copy(names[part]).astype(np.float32) for part in "AB")
        with np.errstate(over="ignore", invalid="ignore"):
            b *= np.float32(scale)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise CheckpointError(f"{file}: {pair.module} has numbers that are not finite, or not after its scale")
        if place is not None:
            pieces = experts.setdefault(place.path, {})
            if place in pieces:
                raise CheckpointError(f"{file}: {pair.module} comes twice, under two prefixes")
            pieces[place] = a, b
        for layer, rows in parts:
            before = layers.setdefault(layer, (a, b[rows]))
            if not all(map(np.array_equal, before, (a, b[rows]))):
                raise CheckpointError(
                    f"{file}: {pair.module} and another module are one shared layer of the model, with different "
                    "adapters: an adapter for each use of a shared layer is not supported"
                )
    rank = max(pair.rank for pair, *_ in checked)
    for path, pieces in experts.items():
        layers[path] = _stacked(known.targets[path], pieces)
    digest = digest_of({layer: dict(zip("AB", pair, strict=True)) for layer, pair in layers.items()})
    return Adapter(layers, rank, digest, scales.base)


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


class _Scales:
    """Ranks and scales by module, from adapter_config.json; refuses what is not supported."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = folder / CONFIG_FILE
        kind = config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{self._file}: peft_type {kind!r} is not supported: only 'LORA' is")
        for field, value in config.items():
            if value and field not in _KNOWN:
                what, instead = _EXPLAINED.get(field, "this is"), _MERGE if field in _EXPLAINED else ""
                raise CheckpointError(f"{self._file}: {field} is {str(value)[:80]}: {what} not supported{instead}")
        if (bias := config.get("bias", "none")) != "none":
            raise CheckpointError(f"{self._file}: bias {bias!r} is not supported: only 'none' is")
        if (start := config.get("init_lora_weights")) not in _ORDINARY_STARTS:
            raise CheckpointError(
                f"{self._file}: init_lora_weights {start!r} changes the base model's weights, which is not supported; "
                "convert the adapter to ordinary LoRA with PEFT"
            )
        base = config.get("base_model_name_or_path")
        self.base = base if isinstance(base, str) else None
        self._rank = self._positive("r", config.get("r"))
        self._alpha = self._positive("lora_alpha", config.get("lora_alpha"))
        self._ranks = self._patterns(config, "rank_pattern")
        self._alphas = self._patterns(config, "alpha_pattern")
        self._stable = bool(config.get("use_rslora"))

    def of(self, module: str, rank: int) -> float:
        """Returns the scale of a module's B A. `rank` is the tensor's, and must be the config's."""
        wanted = _matching(self._ranks, module, self._rank)
        if rank != wanted:
            raise CheckpointError(f"{self._file}: {module} has rank {rank}, but the config says {wanted:g}")
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._stable else rank)

    def _patterns(self, config: Mapping[str, Any], name: str) -> _Patterns:
        found = config.get(name) or {}
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self._file}: {name} is {found!r}: an object is expected")
        values: _Patterns = {}
        for key, value in found.items():
            # PEFT accepts any regular expression here. One from an untrusted file could run without end.
            module = key.removeprefix(".*\\.").removesuffix("$").replace("\\.", ".")
            if not re.fullmatch(r"\^?[\w.]+", module):
                raise CheckpointError(f"{self._file}: {name}: {key!r} is not supported: expected a module's name")
            values[module] = len(values), self._positive(name, value)
        return values

    def _positive(self, name: str, value: Any) -> float:
        largest = float(np.finfo(np.float32).max)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            raise CheckpointError(f"{self._file}: {name} is {str(value)[:80]}: a number above 0 is expected")
        return float(value)


_Patterns = dict[str, tuple[int, float]]
"""Position and value by the name of a module, or by its end, in the order in which they apply."""


def _matching(values: _Patterns, module: str, default: float) -> float:
    """Returns the value of the first key that is the module's name from a dot on, or with ^ the whole name."""
    parts = module.split(".")
    keys = {f"^{module}", *(".".join(parts[start:]) for start in range(len(parts)))} & values.keys()
    return min(values[key] for key in keys)[1] if keys else default


def _pairs(file: SafetensorsFile) -> dict[str, dict[str, str]]:
    """Returns the names of A and B of each adapted module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name, entry in file.entries.items():
        match = _TENSOR.fullmatch(name.removeprefix(MODULE_PREFIX))
        if match is None:
            raise CheckpointError(f"{file.path}: tensor {name} is not supported: expected *.lora_A.weight or lora_B")
        if entry.dtype not in _FLOATS or len(entry.shape) != 2:
            raise CheckpointError(
                f"{file.path}: {name} is {entry.dtype} {list(entry.shape)}: expected 2 axes of {', '.join(_FLOATS)}"
            )
        parts = found.setdefault(match["module"], {})
        if match["part"] in parts:
            raise CheckpointError(f"{file.path}: {name} comes twice")
        parts[match["part"]] = name
    if not found:
        raise CheckpointError(f"{file.path}: has no tensors")
    for module, parts in found.items():
        if parts.keys() != {"A", "B"}:
            raise CheckpointError(f"{file.path}: {module} has lora_{next(iter(parts))} only: A and B are needed")
    return found


@lru_cache(maxsize=4)
def _targets_of(config: HybridConfig) -> _Targets:
    """Returns the targets of a model, which take a trace of it to find."""
    return _Targets(config)


class _Targets:
    """The dense layers and routed experts of a model, by the names of modules in its Hugging Face checkpoints."""

    def __init__(self, config: HybridConfig) -> None:
        self.targets = targets(HybridModel.abstract(config), experts=True)
        self._names: dict[str, list[tuple[str, HFSource]]] = {}
        for path, source in weight_names(config).items():
            for each in (source, *source.alternatives):
                for name in each.names:
                    self._names.setdefault(name, []).append((path, each))

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


def stored_rows(source: HFSource, stored: int) -> np.ndarray:
    """Which of the `stored` rows of a tensor belong to a source, in its order."""
    return own_rows(source, np.arange(stored)).reshape(-1)
