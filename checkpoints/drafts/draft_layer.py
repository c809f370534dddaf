"""Adds a multi-token-prediction layer to a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, listing
from checkpoints.export import stored_tensors
from checkpoints.json_file import read_json
from checkpoints.tensors.tensor_set import INDEX_FILE, TensorSet
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import TEXT_PREFIXES, as_stored, config_from_hf, other_towers
from mamba_jax.families.mtp import LAYERS, PATTERN
from mamba_jax.model import parameters
from mamba_jax.modules.mtp import MTP

DRAFT_FILE = "mtp.safetensors"
_OTHER_SPELLINGS = ("mtp_layers_block_type", "mtp_layer_types")


def with_draft_layer(directory: Path, pattern: str) -> tuple[dict[str, Any], HybridConfig]:
    """Returns the config.json of a checkpoint, and its model's description, with such a layer.

    Args:
        directory: a Hugging Face directory.
        pattern: the layer's sublayers, for example `*-`.
    Raises:
        CheckpointError: the model cannot have such a layer.
    """
    raw = read_json(directory / "config.json")
    raw = {name: value for name, value in raw.items() if name not in _OTHER_SPELLINGS}
    raw |= {LAYERS: 1, PATTERN: pattern}
    try:
        config = config_from_hf(raw)
    except ModelConfigError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    stored = as_stored(config, TensorSet(directory, prefixes=TEXT_PREFIXES).names)
    if stored.own_mtp_embedding or stored.own_mtp_head:
        raise CheckpointError(f"{directory}: has a draft layer with a table of its own; that is not trained")
    return raw, config


def fresh_draft_layer(config: HybridConfig, seed: int) -> dict[str, jax.Array]:
    """Random float32 weights of the layer, by dotted path in the model."""
    layer = MTP(config, rngs=nnx.Rngs(seed), dtype=np.float32)
    return {f"mtp.{path}": leaf.get_value() for path, leaf in parameters(layer).items()}


def begun_draft_layer(config: HybridConfig, values: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Returns float32 weights of a new layer, initialized from the model.

    Its sublayers are copies of the model's last ones of the same kinds (its final norm too), and `eh_proj` adds the
    token's embedding to the previous hidden state. Both are scaled down: the sublayers use only directions, and their
    outputs must not be negligible in the sum. Weights without a counterpart of the same shape are random.

    Args:
        config: of the model with the layer.
        values: the model's weights by dotted path.
        seed: of the random weights.
    """
    layer = fresh_draft_layer(config, seed)
    sources = {"mtp.final_norm.": "final_norm."}
    left = {kind: [i for i, other in enumerate(config.pattern) if other == kind] for kind in config.mtp_pattern}
    for i, kind in reversed(list(enumerate(config.mtp_pattern))):
        if left[kind]:
            sources[f"mtp.blocks.{i}."] = f"blocks.{left[kind].pop()}."
    for target, source in sources.items():
        found = {path: values.get(source + path.removeprefix(target)) for path in layer if path.startswith(target)}
        if all(v is not None and v.shape == layer[path].shape for path, v in found.items()):
            layer |= {path: jnp.asarray(v, jnp.float32) for path, v in found.items()}
    one = 0.1 * np.eye(config.hidden_size, dtype=np.float32)
    return layer | {"mtp.eh_proj.weight": np.concatenate([one, one], axis=1)}


def write_with_draft_layer(
    source: Path, target: Path, raw: Mapping[str, Any], config: HybridConfig, values: Mapping[str, Any]
) -> Path:
    """Copies a Hugging Face directory, with a layer added: the tensors that were there stay byte for byte.

    Args:
        source: the checkpoint. A layer of the same shape that it has already is replaced.
        target: a directory that does not exist, or is empty.
        raw: the new config.json.
        config: the model's description.
        values: the layer's weights by dotted path (`mtp. ...`).
    Returns:
        The new directory.
    Raises:
        CheckpointError: the target is in use, or the source has a layer of another shape.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists already and is not empty")
    tensors = TensorSet(source, prefixes=TEXT_PREFIXES)
    names = [name for name in sorted(tensors.names) if not name.startswith("mtp.")]
    weight_map = {tensors.stored_name(name): tensors.file_of(name) for name in names}
    added = dict(stored_tensors(config, values, only="mtp."))
    if old := sorted(name for name in tensors.names - set(added) if name.startswith("mtp.")):
        raise CheckpointError(f"{source}: has a multi-token-prediction layer of another kind ({listing(old)})")
    shutil.copytree(source, target, dirs_exist_ok=True)
    dtype = tensors.view(next(name for name in names if not other_towers([name]))).dtype
    save_file({name: value.astype(dtype) for name, value in added.items()}, target / DRAFT_FILE, {"format": "pt"})
    weight_map |= dict.fromkeys(added, DRAFT_FILE)
    index = {"metadata": {"added": "multi-token-prediction layer"}, "weight_map": weight_map}
    (target / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    (target / "config.json").write_text(json.dumps(dict(raw), indent=1) + "\n")
    return target
