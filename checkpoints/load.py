"""Models, configurations, tokenizers and sampling defaults by reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.dummy import dummy_parameters
from checkpoints.errors import CheckpointError
from checkpoints.generation import GenerationConfig, read_generation_config
from checkpoints.hugging_face import read_parameters
from checkpoints.json_file import read_json
from checkpoints.orbax import read_description, restore_orbax, save_orbax
from checkpoints.placing import Shardings, abstract_parameters
from checkpoints.presets import preset
from checkpoints.resolve import Kind, Reference, resolve
from checkpoints.tensor_set import TensorSet
from checkpoints.tokenizer import Tokenizer, read_tokenizer
from mamba_jax.config import ConfigError, HybridConfig
from mamba_jax.families import as_stored, config_from_hf, family_of, weight_names
from mamba_jax.model import HybridModel

DTYPES = ("float32", "bfloat16", "float16")
LoadFormat = Literal["auto", "dummy"]


def load_config(ref: str | Path) -> HybridConfig:
    """The configuration of `demo`, a directory or a published size; no weights are needed.

    Raises:
        CheckpointError: see `resolve`; or a configuration that is broken or not supported.
    """
    return _config(resolve(ref))


def load_model(
    ref: str | Path,
    *,
    dtype: Any = "auto",
    load_format: LoadFormat = "auto",
    progress: bool = True,
    sharding: Shardings = None,
    seed: int = 0,
) -> HybridModel:
    """Load a model onto its devices, parameter by parameter.

    Args:
        ref: `demo`, a Hugging Face or Orbax directory; with dummy weights also the name of a published size.
        dtype: `auto` is float32 on CPU and the checkpoint's elsewhere; or a name or dtype.
        load_format: `dummy` draws random weights instead of reading any.
        progress: show a bar on stderr.
        sharding: where parameters go: one sharding for all, or a function of a parameter's dotted path (for example
            `blocks.3.mixer.out_proj.weight`); by default the default device.
        seed: of dummy weights.
    Raises:
        CheckpointError: whatever is wrong with the reference or the checkpoint, in one line.
    """
    reference = resolve(ref)
    if load_format not in ("auto", "dummy"):
        raise CheckpointError(f"load format {load_format!r} is not known; allowed are 'auto' and 'dummy'")
    if load_format == "dummy":
        config = _config(reference)
        kind = _dtype(dtype, None)
        targets = abstract_parameters(config, kind)
        tied = config.tie_word_embeddings
        arrays = dummy_parameters(targets, seed=seed, tied=tied, shardings=sharding, progress=progress)
        return HybridModel.from_parameters(config, arrays)
    if reference.kind is Kind.ORBAX:
        stored = read_description(reference.files).dtype
        return restore_orbax(reference.files, dtype=_dtype(dtype, stored), shardings=sharding, progress=progress)
    fields = read_json(reference.files / "config.json")
    config = _hf_config(reference.files, fields)
    tensors = TensorSet(reference.files)
    config = as_stored(config, tensors.names)
    kind = _dtype(dtype, _stored_dtype(fields))
    family = family_of(config)
    arrays = read_parameters(
        reference.name,
        tensors,
        abstract_parameters(config, kind),
        weight_names(config),
        ignored=family.ignored(config),
        shardings=sharding,
        progress=progress,
    )
    return HybridModel.from_parameters(config, arrays)


def load_tokenizer(ref: str | Path) -> Tokenizer | None:
    """The tokenizer that belongs to a model, or None where there is none (published sizes, bare checkpoints).

    Raises:
        CheckpointError: see `resolve`; or a tokenizer file that is there but broken.
    """
    directory = resolve(ref).directory
    return None if directory is None else read_tokenizer(directory)


def require_tokenizer(ref: str | Path) -> Tokenizer:
    """Like `load_tokenizer`, for those who cannot do without.

    Raises:
        CheckpointError: there is none.
    """
    tokenizer = load_tokenizer(ref)
    if tokenizer is None:
        raise CheckpointError(f"{ref}: has no tokenizer.json, so text cannot be used; give token ids instead")
    return tokenizer


def generation_config(ref: str | Path) -> GenerationConfig:
    """What a checkpoint recommends for sampling, and the ids that end its texts.

    Raises:
        CheckpointError: see `resolve`; or a file that is there but broken.
    """
    directory = resolve(ref).directory
    return GenerationConfig() if directory is None else read_generation_config(directory)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: Any = "auto",
    sharding: Shardings = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Path:
    """Write a model as an Orbax directory, with its configuration, tokenizer and sampling defaults.

    Args:
        source: any reference that `load_model` can load.
        target: the directory to make.
        dtype: `auto` keeps the checkpoint's.
        sharding: how to hold the parameters meanwhile; what is written can be restored with any other.
        overwrite: replace an existing Orbax directory.
        progress: show a bar on stderr.
    Returns:
        The directory.
    Raises:
        CheckpointError: the source cannot be loaded, or the target exists.
    """
    reference = resolve(source)
    if isinstance(dtype, str) and dtype == "auto":
        dtype = _source_dtype(reference)
    model = load_model(source, dtype=dtype, sharding=sharding, progress=progress)
    return save_orbax(target, model, files_from=reference.files, overwrite=overwrite, progress=progress)


def _config(reference: Reference) -> HybridConfig:
    if reference.kind is Kind.PRESET:
        return preset(reference.name)
    if reference.kind is Kind.ORBAX:
        return read_description(reference.files).config
    return _hf_config(reference.files, read_json(reference.files / "config.json"))


def _hf_config(directory: Path, fields: Mapping[str, Any]) -> HybridConfig:
    _refuse_quantized(directory, fields)
    try:
        return config_from_hf(fields)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    except ArithmeticError as error:  # a zero where something is divided by it
        raise CheckpointError(f"{directory / 'config.json'}: has an impossible size ({error})") from error


def _refuse_quantized(directory: Path, fields: Mapping[str, Any]) -> None:
    """Said before the configuration is read, with the name of the format."""
    path, method = directory / "config.json", fields.get("quantization_config")
    if not method and (directory / "hf_quant_config.json").is_file():
        path = directory / "hf_quant_config.json"
        method = read_json(path).get("quantization", {"quant_algo": "unknown"})
    if not method:
        return
    name = (method.get("quant_algo") or method.get("quant_method")) if isinstance(method, Mapping) else method
    raise CheckpointError(f"{path}: quantized weights ({name}) are not supported yet; use the bfloat16 version")


def _stored_dtype(fields: Mapping[str, Any]) -> str | None:
    """What config.json says; newer files call it `dtype`."""
    name = fields.get("dtype") or fields.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def _source_dtype(reference: Reference) -> Any:
    if reference.kind is Kind.ORBAX:
        return read_description(reference.files).dtype
    stored = _stored_dtype(read_json(reference.files / "config.json"))
    return stored if stored in DTYPES else "float32"


def _dtype(wanted: Any, stored: str | None) -> np.dtype:
    """The dtype to load with."""
    if isinstance(wanted, str) and wanted == "auto":
        if jax.default_backend() == "cpu":
            return np.dtype(np.float32)
        return jnp.dtype(stored if stored in DTYPES else "bfloat16")
    try:
        found = jnp.dtype(wanted)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise CheckpointError(f"dtype {wanted!r} is not possible; allowed are auto, {', '.join(DTYPES)}")
    return found
