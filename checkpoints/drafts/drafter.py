"""Loads drafters: separate checkpoints whose models draft from the hidden states of another model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json
from checkpoints.load import LoadedWeights, chosen_dtype
from checkpoints.placing import abstract_parameters, nbytes
from checkpoints.quantized.description import read_quantization
from checkpoints.quantized.tensors import LogicalTensors
from checkpoints.random import dummy_parameters
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.hugging_face import read_parameters
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.config.drafter import DrafterConfig
from mamba_jax.families.drafters import drafter_from_hf, drafter_weight_names, ignored
from mamba_jax.model import HybridModel, parameters

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
    except ModelConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    if method is not None and drafter.method != method:
        raise CheckpointError(f"{ref}: is a drafter of the kind {drafter.method}, not {method}")
    try:
        return target.with_drafter(drafter)
    except ModelConfigError as error:
        raise CheckpointError(f"{ref}: {error}") from error


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
        with FileHasher() as hasher:
            arrays = _read(_directory(ref), drafter, shapes, config.vocab_size, hasher, progress)
            stored = hasher.digest()
    own = {path: leaf[...] for path, leaf in parameters(model).items() if not path.startswith("mtp.")}
    how = hashlib.sha256(repr((loaded.digest, stored, drafter)).encode()).hexdigest()[:32]
    return LoadedWeights(HybridModel.from_parameters(config, own | arrays), how)


def _read(
    directory: Path,
    drafter: DrafterConfig,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    vocab_size: int,
    hasher: FileHasher,
    progress: bool,
) -> dict[str, jax.Array]:
    stored = TensorSet(directory, hasher, prefixes=_PREFIXES)
    tensors = LogicalTensors(str(directory), stored, read_quantization(directory, read_json(directory / "config.json")))
    arrays = read_parameters(
        str(directory), tensors, shapes, drafter_weight_names(drafter), ignored=ignored(drafter), progress=progress
    )
    if drafter.maps_vocabulary:
        tokens = np.arange(drafter.vocab_size) + np.asarray(arrays[f"{_PATH}tokens"])
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise CheckpointError(
                f"{directory}: d2t maps draft tokens to {tokens.min()} to {tokens.max()}: expected tokens from 0 to "
                f"{vocab_size - 1}"
            )
        arrays[f"{_PATH}tokens"] = jnp.asarray(tokens, jnp.int32)
    return arrays


def _directory(ref: str | Path) -> Path:
    directory = Path(ref).expanduser()
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{ref}: not a drafter's directory (no config.json)")
    return directory
