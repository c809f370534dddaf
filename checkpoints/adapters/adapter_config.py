"""`adapter_config.json` of PEFT: the rank and the scale of each module, and what is not supported."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError

CONFIG_FILE = "adapter_config.json"
_ORDINARY_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""

_KNOWN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
))  # fmt: skip
"""Fields of adapter_config.json that are read here, or that only select the tensors of the file."""
_EXPLAINED: Mapping[str, str] = {
    "lora_bias": "biases of adapters are",
    "fan_in_fan_out": "transposed weights are",
}
"""Fields that must be unset, like every unknown field, and what they request."""
MERGE = "; merge the adapter into the model's weights with PEFT's merge_and_unload"


class AdapterConfig:
    """Ranks and scales by module, from adapter_config.json; refuses what is not supported."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._file = folder / CONFIG_FILE
        kind = config.get("peft_type")
        if kind != "LORA":
            raise CheckpointError(f"{self._file}: peft_type {kind!r} is not supported: only 'LORA' is")
        for name, value in config.items():
            if value and name not in _KNOWN:
                what, instead = _EXPLAINED.get(name, "this is"), MERGE if name in _EXPLAINED else ""
                raise CheckpointError(f"{self._file}: {name} is {str(value)[:80]}: {what} not supported{instead}")
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
        self.magnitudes = bool(config.get("use_dora"))
        whole = config.get("modules_to_save") or ()
        self._whole = [whole] if isinstance(whole, str) else whole
        if not isinstance(self._whole, list | tuple):
            raise CheckpointError(f"{self._file}: modules_to_save is {str(whole)[:80]!r}, expected a list of names")
        self.tied = bool(config.get("ensure_weight_tying"))

    def check_whole(self, modules: Collection[str]) -> None:
        """Raises `CheckpointError` unless these embeddings and heads are all modules that were trained as a whole."""
        for name in self._whole:
            if not any(f".{module}".endswith(f".{name}") for module in modules):
                raise CheckpointError(
                    f"{self._file}: modules_to_save has {str(name)[:80]}, which is neither embedding nor head of the "
                    f"model, or has no weight in the file{MERGE}"
                )

    def of(self, module: str, rank: int) -> float:
        """Returns the scale of a module's B A. `rank` is the tensor's, and must be the config's."""
        wanted = _matching(self._ranks, module, self._rank)
        if rank != wanted:
            raise CheckpointError(f"{self._file}: {module} has rank {rank}, but the config says {wanted:g}")
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._stable else rank)

    def _patterns(self, config: Mapping[str, Any], name: str) -> Patterns:
        found = config.get(name) or {}
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self._file}: {name} is {found!r}: an object is expected")
        values: Patterns = {}
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


Patterns = dict[str, tuple[int, float]]
"""Position and value by the name of a module, or by its end, in the order in which they apply."""


def _matching(values: Patterns, module: str, default: float) -> float:
    """Returns the value of the first key that is the module's name from a dot on, or with ^ the whole name."""
    parts = module.split(".")
    keys = {f"^{module}", *(".".join(parts[start:]) for start in range(len(parts)))} & values.keys()
    return min(values[key] for key in keys)[1] if keys else default
