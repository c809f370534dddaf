"""Writes trained LoRA adapters as PEFT does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.adapters.adapter import CONFIG_FILE, MODULE_PREFIX, WEIGHTS_FILE, stored_rows
from mamba_jax.adapters import adaptable_layers
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import weight_names
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel

ALL_LINEAR = "all-linear"
_ONLY_IN_CHECKPOINTS = ("model.language_model.", ".block_sparse_moe.")
"""Parts of names that transformers changes when it loads a checkpoint."""
_BACKBONE = ("Mamba", "Mamba2")
"""Families whose module in transformers is `backbone`. In the others it is `model`."""


def target_layers(config: HybridConfig, targets: str = ALL_LINEAR) -> dict[str, str]:
    """Returns the dense layers that an adapter with these targets changes, and each layer's module in the checkpoint.

    Args:
        targets: last parts of modules' names, separated by commas, such as `in_proj`; `all-linear` is all dense layers.
    Raises:
        ModelConfigError: a target matches no dense layer, or layers of the model are used several times.
    """
    if config.shared is not None:
        raise ModelConfigError(f"{config.family}: an adapter for blocks that are used several times is not supported")
    sources = _sources(config)
    found = {
        path: sources[path].names[0].removesuffix(".weight") for path in adaptable_layers(HybridModel.abstract(config))
    }
    known = {name.rpartition(".")[2] for name in found.values()}
    names = {name.strip() for name in targets.split(",")}
    if unknown := sorted(names - known - {ALL_LINEAR}):
        raise ModelConfigError(
            f"target module {unknown[0]!r} is no dense layer of the model; known are {', '.join(sorted(known))}"
        )
    return {path: name for path, name in found.items() if ALL_LINEAR in names or name.rpartition(".")[2] in names}


def write_adapter(
    path: str | Path,
    modules: Mapping[str, tuple[Any, Mapping[str, Any]]],
    config: HybridConfig,
    *,
    alpha: float,
    base: str | None = None,
) -> None:
    """Writes an adapter.

    Args:
        path: the directory, which is created if necessary.
        modules: by a name of `target_layers`: A [rank, inputs], and B [outputs, rank] by the dotted path of each layer
            that is a part of the module. The scale is not applied.
        config: of the model.
        alpha: `lora_alpha`; the scale is alpha / rank.
        base: `base_model_name_or_path`.
    """
    sources, layers = _sources(config), adaptable_layers(HybridModel.abstract(config))
    tensors: dict[str, np.ndarray] = {}
    for module, (a, parts) in modules.items():
        for layer, rows_of_b in parts.items():
            source = sources[layer]
            (stored, *_) = source.stored((math.prod(layers[layer].weight.shape[:-1]), a.shape[1]))
            b = tensors.setdefault(f"{MODULE_PREFIX}{module}.lora_B.weight", np.zeros((stored, len(a)), np.float32))
            b[stored_rows(source, stored)] = rows_of_b
        tensors[f"{MODULE_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a, np.float32)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(next(iter(modules.values()))[0]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(modules),
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def _sources(config: HybridConfig) -> dict[str, HFSource]:
    """By the dotted path of a dense layer, where its weight is under the name of transformers' module."""
    first = "backbone." if config.family in _BACKBONE else "model."
    found = {}
    for path, source in weight_names(config).items():
        spellings = [
            each
            for each in (source, *source.alternatives)
            if each.names[0].startswith(first) and not any(part in each.names[0] for part in _ONLY_IN_CHECKPOINTS)
        ]
        # Families list the names of published checkpoints first.
        found[path.removesuffix(".weight")] = spellings[-1] if spellings else source
    return found
