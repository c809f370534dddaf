"""Models, configurations and sampling defaults by reference."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.config_json import overridden, read_text_fields
from checkpoints.dummy import dummy_parameters
from checkpoints.errors import CheckpointError
from checkpoints.file_digest import FileHasher
from checkpoints.generation import GenerationConfig, read_generation_config
from checkpoints.hugging_face import parameter_shapes, read_parameters
from checkpoints.orbax import read_description, restore_orbax, stored_parameters
from checkpoints.placing import Shardings, abstract_parameters, nbytes
from checkpoints.presets import PRESETS
from checkpoints.quantised import LogicalTensors, read_quantisation
from checkpoints.quantised.rounding import Selection
from checkpoints.quantised.stored import StoredWeight
from checkpoints.quantised.tensors import CACHE_SCALES, by_place
from checkpoints.resolve import Reference, ReferenceKind, resolve
from checkpoints.tensor_set import TensorSet
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import (
    TEXT_PREFIXES,
    as_stored,
    config_from_hf,
    ignored,
    other_towers,
    weight_names,
)
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel
from mamba_jax.modules.quantised import can_be_quantised

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
LoadFormat = Literal["auto", "dummy"]


Overrides = Mapping[str, Any] | str | None
"""`hf_overrides`: fields that replace those of config.json, as an object or JSON text; see `checkpoints.overrides`."""


def load_config(ref: str | Path, *, hf_overrides: Overrides = None) -> HybridConfig:
    """Returns the configuration of `demo`, a directory or a published size; no weights are needed.

    Raises:
        CheckpointError: see `resolve`; or the configuration is invalid or not supported.
    """
    return _config(resolve(ref, hf_overrides))


@dataclass(frozen=True)
class LoadedWeights:
    """A model, and the digest that identifies its weights."""

    model: HybridModel
    digest: str
    """A digest of the stored bytes of the weights, the configuration and the conversion: equal for equal weights that
    are loaded in the same way. Weights stored in another format have another digest."""


def load_model(
    ref: str | Path,
    *,
    dtype: Any = "auto",
    load_format: LoadFormat = "auto",
    progress: bool = True,
    sharding: Shardings = None,
    seed: int = 0,
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    hf_overrides: Overrides = None,
) -> HybridModel:
    """Loads a model onto its devices, parameter by parameter.

    Args:
        ref: `demo`, a Hugging Face or Orbax directory; with dummy weights also the name of a published size.
        dtype: `auto` is float32 on CPU and the checkpoint's elsewhere; or a name or dtype.
        load_format: `dummy` draws random weights instead of reading any.
        progress: show a bar on stderr.
        sharding: where parameters go: one sharding for all, or a function of a parameter's dotted path (for example
            `blocks.3.mixer.out_proj.weight`); by default the default device.
        seed: of dummy weights.
        quantization: one of `checkpoints.quantised.rounding.QUANTIZATIONS`: weights are quantised while they are read.
        quantization_exclude: names of modules or weights that are not quantised, with wildcards; see `Selection`.
        hf_overrides: fields that replace those of config.json; nested objects are merged, and dotted keys name nested
            fields.
    Raises:
        CheckpointError: the reference or the checkpoint is invalid; the message is one line.
    """
    reference = resolve(ref, hf_overrides)
    _check_format(load_format)
    if load_format == "dummy":
        return _dummy(reference, dtype, progress, sharding, seed, quantization, quantization_exclude)
    return _read(reference, dtype, progress, sharding, quantization, quantization_exclude, None)


def load_weights(
    ref: str | Path,
    *,
    dtype: Any = "auto",
    load_format: LoadFormat = "auto",
    progress: bool = True,
    sharding: Shardings = None,
    seed: int = 0,
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    hf_overrides: Overrides = None,
) -> LoadedWeights:
    """Loads a model as `load_model` does, and identifies its weights by a digest of all of their bytes.

    Hashes every byte of the files while they are read, including bytes that only other processes load. A file that has
    not changed since it was last hashed is not hashed again.

    Raises:
        CheckpointError: as `load_model`; or a file that changes while it is read.
    """
    reference = resolve(ref, hf_overrides)
    _check_format(load_format)
    if load_format == "dummy":
        model = _dummy(reference, dtype, progress, sharding, seed, quantization, quantization_exclude)
        stored = f"dummy {seed} {np.__version__}"
    else:
        with FileHasher() as hasher:
            model = _read(reference, dtype, progress, sharding, quantization, quantization_exclude, hasher)
            stored = hasher.digest()
    how = [stored, repr(model.config), str(model.dtype), quantization, sorted(quantization_exclude)]
    if reference.hf_overrides:
        how.append(json.dumps(reference.hf_overrides, sort_keys=True))
    return LoadedWeights(model, hashlib.sha256(repr(tuple(how)).encode()).hexdigest()[:32])


def _check_format(load_format: str) -> None:
    if load_format not in ("auto", "dummy"):
        raise CheckpointError(f"load format {load_format!r} is not supported; allowed are 'auto' and 'dummy'")


def _dummy(
    reference: Reference,
    dtype: Any,
    progress: bool,
    sharding: Shardings,
    seed: int,
    quantization: str | None,
    exclude: Collection[str],
) -> HybridModel:
    config = _config(reference)
    targets = abstract_parameters(config, _dtype(dtype, None))
    selection = _selection(config, quantization, exclude)
    tied = config.tie_word_embeddings
    arrays = dummy_parameters(targets, seed=seed, tied=tied, selection=selection, shardings=sharding, progress=progress)
    return HybridModel.from_parameters(config, arrays)


def _read(
    reference: Reference,
    dtype: Any,
    progress: bool,
    sharding: Shardings,
    quantization: str | None,
    exclude: Collection[str],
    hasher: FileHasher | None,
) -> HybridModel:
    if reference.kind is ReferenceKind.ORBAX:
        if quantization is not None:
            raise CheckpointError(f"{reference.name}: quantize when converting: mamba-jax convert --quantization")
        kind = _dtype(dtype, read_description(reference.files).dtype)
        return restore_orbax(reference.files, dtype=kind, shardings=sharding, progress=progress, hasher=hasher)
    fields = _text_fields(reference)
    config = _hf_config(reference, fields)
    stored = TensorSet(reference.files, hasher, prefixes=TEXT_PREFIXES)
    tensors = LogicalTensors(reference.name, stored, read_quantisation(reference.files, fields))
    config = as_stored(config, tensors.names)
    kind = _dtype(dtype, _stored_dtype(fields))
    sources = weight_names(config)
    if towers := other_towers(tensors.names):
        counts = ", ".join(f"{tower} ({count})" for tower, count in towers.items())
        log.info("%s: only the text model is loaded; left out are the tensors of %s", reference.name, counts)
    if tensors.quantised:
        log.info("quantized weights: %s", tensors)
    if quantization is not None and tensors.quantised:
        raise CheckpointError(f"{reference.name}: is quantized already ({tensors})")
    arrays = read_parameters(
        reference.name,
        tensors,
        abstract_parameters(config, kind),
        sources,
        ignored=(*ignored(config), CACHE_SCALES),
        quantised=_kept_narrow(config, tensors, sources),
        selection=_selection(config, quantization, exclude),
        shardings=sharding,
        progress=progress,
    )
    return HybridModel.from_parameters(config, arrays)


def weight_bytes(
    ref: str | Path,
    *,
    dtype: Any = "auto",
    load_format: LoadFormat = "auto",
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    hf_overrides: Overrides = None,
) -> int:
    """Returns bytes of the weights as `load_model` would make them, or a little less; none of them is read.

    Raises:
        CheckpointError: see `load_model`.
    """
    reference = resolve(ref, hf_overrides)
    dummy = load_format == "dummy"
    if not dummy and reference.kind is ReferenceKind.HUGGING_FACE:
        fields = _text_fields(reference)
        if read_quantisation(reference.files, fields) is not None:  # stays as narrow as it is stored
            return sum(path.stat().st_size for path in reference.files.glob("*.safetensors"))
    stored = None if dummy else source_dtype(reference)
    config = _config(reference)
    shapes = abstract_parameters(config, _dtype(dtype, stored))
    selection = _selection(config, quantization, quantization_exclude)
    return sum(map(nbytes, (shapes if selection is None else selection.parameters(shapes, None)).values()))


def generation_config(ref: str | Path, *, hf_overrides: Overrides = None) -> GenerationConfig:
    """Returns a checkpoint's recommended sampling parameters and the ids that end its texts.

    Raises:
        CheckpointError: see `resolve`; or a file exists but is invalid.
    """
    reference = resolve(ref, hf_overrides)
    directory = reference.directory
    return GenerationConfig() if directory is None else read_generation_config(directory, reference.hf_overrides)


def _text_fields(reference: Reference) -> Mapping[str, Any]:
    return read_text_fields(reference.files, reference.hf_overrides)


def _config(reference: Reference) -> HybridConfig:
    if reference.kind is ReferenceKind.ORBAX:
        return read_description(reference.files).config
    if reference.kind is not ReferenceKind.PRESET:
        return _hf_config(reference, _text_fields(reference))
    try:
        return _hf_config(reference, overridden(PRESETS[reference.name].fields, reference.hf_overrides))
    except ModelConfigError as error:
        raise CheckpointError(f"{reference.name}: {error}") from error


def _hf_config(reference: Reference, fields: Mapping[str, Any]) -> HybridConfig:
    where = reference.name if reference.directory is None else reference.directory / "config.json"
    try:
        return config_from_hf(fields)
    except ModelConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except ArithmeticError as error:  # a division by a field that is zero
        raise CheckpointError(f"{where}: has an impossible size ({error})") from error


def weight_shapes(
    ref: str | Path,
    *,
    dtype: Any,
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    sharding: Shardings = None,
    hf_overrides: Overrides = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the parameters that `load_model` would load, by dotted path; no weights are read.

    Raises:
        CheckpointError: as `load_model`.
    """
    reference = resolve(ref, hf_overrides)
    config, kind = _config(reference), _dtype(dtype, None)
    wide = abstract_parameters(config, kind)
    if reference.kind is ReferenceKind.ORBAX:
        return stored_parameters(read_description(reference.files), kind)
    if reference.kind in (ReferenceKind.HUGGING_FACE, ReferenceKind.DEMO) and quantization is None:
        how = read_quantisation(reference.files, _text_fields(reference))
        if how is not None:
            tensors = LogicalTensors(reference.name, TensorSet(reference.files, prefixes=TEXT_PREFIXES), how)
            sources = weight_names(config)
            narrow = _kept_narrow(config, tensors, sources)
            return parameter_shapes(tensors, wide, sources, narrow, sharding)
    selection = _selection(config, quantization, quantization_exclude)
    return wide if selection is None else selection.parameters(wide, sharding)


def quantised_as(ref: str | Path, *, hf_overrides: Overrides = None) -> str:
    """Describes which parts of a checkpoint are quantised, and how; empty if none.

    Raises:
        CheckpointError: as `load_model`.
    """
    reference = resolve(ref, hf_overrides)
    if reference.kind is ReferenceKind.ORBAX:
        narrow = read_description(reference.files).narrow
        return by_place(
            (kind, weight) for path, kind in narrow.items() if (weight := path.removesuffix(".values")) != path
        )
    if reference.kind is ReferenceKind.PRESET:
        return ""
    how = read_quantisation(reference.files, _text_fields(reference))
    if how is None:
        return ""
    return str(LogicalTensors(reference.name, TensorSet(reference.files, prefixes=TEXT_PREFIXES), how))


def _selection(config: HybridConfig, quantization: str | None, exclude: Collection[str]) -> Selection | None:
    if quantization is None:
        if exclude:
            raise CheckpointError("quantization_exclude has no effect without quantization")
        return None
    return Selection(config, weight_names(config), quantization, exclude)


def _kept_narrow(
    config: HybridConfig, tensors: LogicalTensors, sources: Mapping[str, HFSource]
) -> dict[str, StoredWeight]:
    """Returns the quantised tensors that the model can take as they are; the others are widened as they are read."""
    if not tensors.quantised:
        return {}
    model = HybridModel.abstract(config)
    found = {path: source.find(tensors.names) for path, source in sources.items()}
    return {
        name: tensors.quantised[name]
        for path, source in found.items()
        if source is not None and can_be_quantised(model, path)
        for name in source.names
        if name in tensors.quantised and tensors.quantised[name].narrow
    }


def _stored_dtype(fields: Mapping[str, Any]) -> str | None:
    """Returns the dtype in config.json; newer files call the field `dtype`."""
    name = fields.get("dtype") or fields.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def default_dtype(wanted: Any) -> np.dtype:
    """Returns the dtype that the flag means for weights of which nothing else is known."""
    return _dtype(wanted, None)


def source_dtype(reference: Reference) -> Any:
    """Returns the dtype of most stored bytes."""
    if reference.kind is ReferenceKind.ORBAX:
        return read_description(reference.files).dtype
    stored = _stored_dtype(_text_fields(reference))
    return stored if stored in DTYPES else "float32"


def _dtype(wanted: Any, stored: str | None) -> np.dtype:
    """Returns the dtype to load with."""
    if isinstance(wanted, str) and wanted == "auto":
        if jax.default_backend() == "cpu":
            return np.dtype(np.float32)
        return jnp.dtype(stored if stored in DTYPES else "bfloat16")
    try:
        found = jnp.dtype(wanted)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        raise CheckpointError(f"dtype {wanted!r} is not supported; allowed are auto, {', '.join(DTYPES)}")
    return found
