"""Models, configurations and sampling defaults by reference."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.config_json import GenerationConfig, overridden, read_generation_config, read_text_fields
from checkpoints.errors import CheckpointError
from checkpoints.orbax import read_description, restore_orbax, stored_parameters
from checkpoints.placing import Shardings, abstract_parameters, nbytes
from checkpoints.presets import PRESETS
from checkpoints.quantized.description import read_quantization
from checkpoints.quantized.rounding import Selection
from checkpoints.quantized.stored import StoredWeight
from checkpoints.quantized.tensors import CACHE_SCALES, UNUSED_SCALES, LogicalTensors, by_place
from checkpoints.random import dummy_parameters, tensor_shapes
from checkpoints.resolve import Reference, ReferenceKind, resolve
from checkpoints.tensors.file_digest import FileHasher
from checkpoints.tensors.hugging_face import parameter_shapes, read_parameters
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import TEXT_PREFIXES, as_stored, config_from_hf, ignored, other_towers, weight_names
from mamba_jax.families.base import HFSource
from mamba_jax.model import HybridModel
from mamba_jax.modules.quantized import can_be_quantized

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
Overrides = Mapping[str, Any] | str | None
"""`hf_overrides`: fields that replace those of config.json, as an object or JSON text; see `parse_overrides`."""


@dataclass(frozen=True)
class LoadedWeights:
    """A model, and the digest that identifies its weights."""

    model: HybridModel
    digest: str
    """A digest of the stored bytes of the weights, the configuration and the conversion: equal for equal weights that
    are loaded in the same way. Weights stored in another format have another digest."""


@dataclass(frozen=True)
class Checkpoint:
    """A model by reference, and how its weights are loaded.

    All methods raise CheckpointError if the reference or the checkpoint is invalid; the message is one line.
    """

    ref: str | Path
    """`demo`, a Hugging Face or Orbax directory; with dummy weights also the name of a published size."""
    dtype: Any = "auto"
    """`auto` is float32 on CPU and the checkpoint's elsewhere; or a name or dtype."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` draws random weights instead of reading any."""
    seed: int = 0
    """Of dummy weights."""
    quantization: str | None = None
    """One of `checkpoints.quantized.rounding.QUANTIZATIONS`: weights are quantized while they are read."""
    quantization_exclude: Collection[str] = ()
    """Names of modules or weights that are not quantized, with wildcards; see `Selection`."""
    hf_overrides: Overrides = None
    """Fields that replace those of config.json; nested objects are merged, and dotted keys name nested fields."""

    @cached_property
    def reference(self) -> Reference:
        """Where the checkpoint is."""
        return resolve(self.ref, self.hf_overrides)

    @cached_property
    def config(self) -> HybridConfig:
        """The configuration; no weights are needed."""
        if self.reference.kind is ReferenceKind.ORBAX:
            return read_description(self.reference.files).config
        where = self.reference.name if self.reference.directory is None else self.reference.directory / "config.json"
        try:
            return config_from_hf(self._fields)
        except ModelConfigError as error:
            raise CheckpointError(f"{where}: {error}") from error
        except ArithmeticError as error:  # a division by a field that is zero
            raise CheckpointError(f"{where}: has an impossible size ({error})") from error

    def load(self, *, progress: bool, sharding: Shardings, hasher: FileHasher | None = None) -> HybridModel:
        """Loads the model onto its devices, parameter by parameter; `hasher` reads what is read."""
        if self.load_format not in ("auto", "dummy"):
            raise CheckpointError(f"load format {self.load_format!r} is not supported; allowed are 'auto' and 'dummy'")
        if self.load_format == "dummy":
            config = self.config
            arrays = dummy_parameters(
                abstract_parameters(config, chosen_dtype(self.dtype)),
                seed=self.seed,
                tied=config.tie_word_embeddings,
                selection=self._selection(config),
                shardings=sharding,
                progress=progress,
            )
            return HybridModel.from_parameters(config, arrays)
        files, name = self.reference.files, self.reference.name
        if self.reference.kind is ReferenceKind.ORBAX:
            self._refuse_quantization()
            dtype = chosen_dtype(self.dtype, read_description(files).dtype)
            return restore_orbax(files, dtype=dtype, shardings=sharding, progress=progress, hasher=hasher)
        tensors = self._tensors(hasher)
        config = as_stored(self.config, tensors.names)
        sources = weight_names(config)
        if towers := other_towers(tensors.names):
            counts = ", ".join(f"{tower} ({count})" for tower, count in towers.items())
            log.info("%s: only the text model is loaded; left out are the tensors of %s", name, counts)
        if tensors.quantized:
            log.info("quantized weights: %s", tensors)
        if self.quantization is not None and tensors.quantized:
            raise CheckpointError(f"{name}: is quantized already ({tensors})")
        arrays = read_parameters(
            name,
            tensors,
            abstract_parameters(config, chosen_dtype(self.dtype, _stored_dtype(self._fields))),
            sources,
            ignored=(*ignored(config), CACHE_SCALES, UNUSED_SCALES),
            quantized=_kept_narrow(config, tensors, sources),
            selection=self._selection(config),
            shardings=sharding,
            progress=progress,
        )
        return HybridModel.from_parameters(config, arrays)

    def load_identified(self, *, progress: bool = True, sharding: Shardings = None) -> LoadedWeights:
        """Loads the model, and identifies its weights by a digest of all of their bytes.

        Hashes every byte of the files while they are read, including bytes that only other processes load. A file that
        has not changed since it was last hashed is not hashed again; one that changes while it is read is an error.
        """
        if self.load_format == "dummy":
            model, stored = self.load(progress=progress, sharding=sharding), f"dummy {self.seed} {np.__version__}"
        else:
            with FileHasher() as hasher:
                model = self.load(progress=progress, sharding=sharding, hasher=hasher)
                stored = hasher.digest()
        how = [stored, repr(model.config), str(model.dtype), self.quantization, sorted(self.quantization_exclude)]
        if self.reference.hf_overrides:
            how.append(json.dumps(self.reference.hf_overrides, sort_keys=True))
        return LoadedWeights(model, hashlib.sha256(repr(tuple(how)).encode()).hexdigest()[:32])

    def nbytes(self) -> int:
        """Returns bytes of the weights as `load` would make them, or a little less; none of them is read."""
        return sum(map(nbytes, self.shapes().values()))

    def shapes(self, sharding: Shardings = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the parameters that `load` would load, by dotted path; no weights are read."""
        dtype, stored = chosen_dtype(self.dtype, self._source_dtype), self.load_format != "dummy"
        if stored and self.reference.kind is ReferenceKind.ORBAX:
            self._refuse_quantization()
            return stored_parameters(read_description(self.reference.files), dtype)
        if stored and self.quantization is None and self._quantization is not None:
            # Some forms stay narrow, others are widened.
            tensors = self._tensors()
            config = as_stored(self.config, tensors.names)
            sources = weight_names(config)
            narrow = _kept_narrow(config, tensors, sources)
            return parameter_shapes(tensors, abstract_parameters(config, dtype), sources, narrow, sharding)
        wide, selection = abstract_parameters(self.config, dtype), self._selection(self.config)
        return wide if selection is None else selection.parameters(wide, sharding)

    def quantized_as(self) -> str:
        """Describes which parts are quantized, and how; empty if none."""
        if self.reference.kind is ReferenceKind.ORBAX:
            narrow = read_description(self.reference.files).narrow
            return by_place(
                (kind, weight) for path, kind in narrow.items() if (weight := path.removesuffix(".values")) != path
            )
        return "" if self._quantization is None else str(self._tensors())

    @cached_property
    def _fields(self) -> Mapping[str, Any]:
        """The text model's fields of config.json."""
        if self.reference.kind is not ReferenceKind.PRESET:
            return read_text_fields(self.reference.files, self.reference.hf_overrides)
        try:
            return overridden(PRESETS[self.reference.name].fields, self.reference.hf_overrides)
        except ModelConfigError as error:
            raise CheckpointError(f"{self.reference.name}: {error}") from error

    @property
    def _source_dtype(self) -> str | None:
        """The dtype of most stored bytes; None if there are none, or if nothing says it."""
        if self.load_format == "dummy" or self.reference.kind is ReferenceKind.PRESET:
            return None
        if self.reference.kind is ReferenceKind.ORBAX:
            return str(read_description(self.reference.files).dtype)
        return _stored_dtype(self._fields)

    @cached_property
    def _quantization(self) -> Any:
        """What config.json says about quantized weights; None if there are none."""
        preset = self.reference.kind is ReferenceKind.PRESET
        return None if preset else read_quantization(self.reference.files, self._fields)

    def _tensors(self, hasher: FileHasher | None = None) -> LogicalTensors:
        stored = TensorSet(self.reference.files, hasher, prefixes=TEXT_PREFIXES)
        wide = cache(partial(tensor_shapes, self.config))
        return LogicalTensors(self.reference.name, stored, self._quantization, wide)

    def _refuse_quantization(self) -> None:
        """Raises `CheckpointError` if flags ask to quantize an Orbax checkpoint, which is impossible while loading."""
        if self._selection(self.config) is not None:
            raise CheckpointError(f"{self.reference.name}: quantize when converting: mamba-jax convert --quantization")

    def _selection(self, config: HybridConfig) -> Selection | None:
        """Returns the weights to be quantized; None: none."""
        if self.quantization is None:
            if self.quantization_exclude:
                raise CheckpointError("quantization_exclude has no effect without quantization")
            return None
        return Selection(config, weight_names(config), self.quantization, self.quantization_exclude)


def load_config(ref: str | Path, *, hf_overrides: Overrides = None) -> HybridConfig:
    """Returns the configuration of `demo`, a directory or a published size; no weights are needed.

    Raises:
        CheckpointError: see `resolve`; or the configuration is invalid or not supported.
    """
    return Checkpoint(ref, hf_overrides=hf_overrides).config


def load_model(ref: str | Path, *, progress: bool = True, sharding: Shardings = None, **options: Any) -> HybridModel:
    """Loads a model onto its devices, parameter by parameter.

    Args:
        ref: `demo`, a Hugging Face or Orbax directory; with dummy weights also the name of a published size.
        progress: show a bar on stderr.
        sharding: where parameters go: one sharding for all, or a function of a parameter's dotted path (for example
            `blocks.3.mixer.out_proj.weight`); by default the default device.
        options: `dtype`, `load_format`, `seed`, `quantization`, `quantization_exclude` and `hf_overrides`, as
            `Checkpoint` has them.
    Raises:
        CheckpointError: the reference or the checkpoint is invalid; the message is one line.
    """
    return Checkpoint(ref, **options).load(progress=progress, sharding=sharding)


def generation_config(ref: str | Path, *, hf_overrides: Overrides = None) -> GenerationConfig:
    """Returns a checkpoint's recommended sampling parameters and the ids that end its texts.

    Raises:
        CheckpointError: see `resolve`; or a file exists but is invalid.
    """
    reference = resolve(ref, hf_overrides)
    directory = reference.directory
    return GenerationConfig() if directory is None else read_generation_config(directory, reference.hf_overrides)


def _kept_narrow(
    config: HybridConfig, tensors: LogicalTensors, sources: Mapping[str, HFSource]
) -> dict[str, StoredWeight]:
    """Returns the quantized tensors that the model can take as they are; the others are widened as they are read."""
    if not tensors.quantized:
        return {}
    model = HybridModel.abstract(config)
    names = tensors.names
    found = {path: source.find(names) for path, source in sources.items()}
    return {
        name: tensors.quantized[name]
        for path, source in found.items()
        if source is not None and can_be_quantized(model, path)
        for name in source.names
        if name in tensors.quantized and tensors.quantized[name].narrow
    }


def _stored_dtype(fields: Mapping[str, Any]) -> str | None:
    """Returns the dtype in config.json; newer files call the field `dtype`."""
    name = fields.get("dtype") or fields.get("torch_dtype")
    return str(name).removeprefix("torch.") if name else None


def source_dtype(ref: str | Path) -> str:
    """Returns the dtype of most stored bytes."""
    stored = Checkpoint(ref)._source_dtype
    return stored if stored in DTYPES else "float32"


def chosen_dtype(wanted: Any, stored: str | None = None) -> np.dtype:
    """Returns the dtype to load with: that of the flag, for weights whose dtype in config.json is `stored`."""
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
