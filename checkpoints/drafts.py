"""Draft layers and drafters: weights that draft from the hidden states of another model."""

from __future__ import annotations

import hashlib
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
from checkpoints.load import LoadedWeights, chosen_dtype
from checkpoints.placing import abstract_parameters, nbytes
from checkpoints.quantized.description import read_quantization
from checkpoints.quantized.tensors import LogicalTensors
from checkpoints.random import dummy_parameters
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.hugging_face import read_parameters
from checkpoints.tensors.tensor_set import INDEX_FILE, TensorSet
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import TEXT_PREFIXES, as_stored, config_from_hf, other_towers
from mamba_jax.families.drafters import drafter_from_hf, drafter_weight_names, ignored
from mamba_jax.families.mtp import LAYERS, PATTERN
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.drafter import MTP

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
    weight_map = dict(map(tensors.location, names))
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


_PATH = "drafter."
_PREFIXES = ("model.",)


def load_drafter_config(ref: str | Path, target: HybridConfig, *, method: str | None = None) -> HybridConfig:
    """Returns the target's configuration with the drafter of a directory; weights may be absent.

    Args:
        ref: a directory with the drafter's config.json.
        target: the model that it drafts for.
        method: the kind of drafter that is expected; None: any.

    Raises:
        CheckpointError: there is no drafter, or it does not fit the target; the message is one line.
    """
    directory = _directory(ref)
    names = TensorSet(directory, prefixes=_PREFIXES).names if any(directory.glob("*.safetensors")) else None
    try:
        drafter = drafter_from_hf(read_json(directory / "config.json"), target, names)
        if method is not None and drafter.method != method:
            raise CheckpointError(f"{ref}: is a drafter of the kind {drafter.method}, not {method}")
        return target.with_drafter(drafter)
    except ModelConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error


def drafter_shapes(config: HybridConfig, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the parameters of a model's drafter, by dotted path in the model."""
    return {path: leaf for path, leaf in abstract_parameters(config, dtype).items() if path.startswith(_PATH)}


def drafter_bytes(config: HybridConfig, dtype: Any) -> int:
    """Returns bytes of the weights of a model's drafter; 0 without one. `dtype` is the flag of `load_model`."""
    if config.drafter is None:
        return 0
    return sum(map(nbytes, drafter_shapes(config, chosen_dtype(dtype)).values()))


def with_drafter(
    ref: str | Path,
    loaded: LoadedWeights,
    *,
    method: str | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = False,
) -> LoadedWeights:
    """Loads a drafter in the dtype of its target, and returns the target with it.

    Args:
        ref: the drafter's directory.
        loaded: the target. Its multi-token-prediction layer is dropped. The digest becomes that of both.
        method: as for `load_drafter_config`.
        load_format: `dummy` draws random weights.
        seed: of dummy weights.
        progress: show a bar.

    Raises:
        CheckpointError: as `load_drafter_config`; or tensors are missing, left over or of the wrong shape.
    """
    model = loaded.model
    config = load_drafter_config(ref, model.config, method=method)
    drafter = config.drafter
    assert drafter is not None
    shapes = drafter_shapes(config, model.dtype)
    if load_format == "dummy":
        arrays = dummy_parameters(shapes, seed=seed, progress=progress)
        if drafter.maps_vocabulary:
            arrays[f"{_PATH}tokens"] = jnp.arange(drafter.vocab_size, dtype=jnp.int32)
        stored = f"dummy {seed} {np.__version__}"
    else:
        folder = _directory(ref)
        where, how = str(folder), read_quantization(folder, read_json(folder / "config.json"))
        with FileHasher() as hasher:
            tensors = LogicalTensors(where, TensorSet(folder, hasher, prefixes=_PREFIXES), how)
            names, unused = drafter_weight_names(drafter), ignored(drafter)
            arrays = read_parameters(where, tensors, shapes, names, ignored=unused, progress=progress)
            stored = hasher.digest()
        if drafter.maps_vocabulary:
            tokens = np.arange(drafter.vocab_size) + np.asarray(arrays[f"{_PATH}tokens"])
            if tokens.min() < 0 or tokens.max() >= config.vocab_size:
                raise CheckpointError(
                    f"{folder}: d2t maps draft tokens to {tokens.min()} to {tokens.max()}: expected tokens from 0 to "
                    f"{config.vocab_size - 1}"
                )
            arrays[f"{_PATH}tokens"] = jnp.asarray(tokens, jnp.int32)
    own = {path: leaf[...] for path, leaf in parameters(model).items() if not path.startswith("mtp.")}
    digest = hashlib.sha256(repr((loaded.digest, stored, drafter)).encode()).hexdigest()[:32]
    return LoadedWeights(HybridModel.from_parameters(config, own | arrays), digest)


def _directory(ref: str | Path) -> Path:
    directory = Path(ref).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{ref}: not a drafter's directory (no config.json)")
    return directory
