"""From one kind of checkpoint to another."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp

from checkpoints.errors import CheckpointError
from checkpoints.export import save_hugging_face
from checkpoints.json_file import read_json
from checkpoints.load import Checkpoint, load_config, load_model, source_dtype
from checkpoints.orbax import save_orbax
from checkpoints.placing import Shardings
from checkpoints.quantised.rounding import Selection
from checkpoints.resolve import Reference, ReferenceKind, resolve
from checkpoints.tensors.rewrite import rewrite_hugging_face
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.families import TEXT_PREFIXES, as_stored, weight_names

Form = Literal["orbax", "hugging-face"]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    form: Form = "orbax",
    dtype: Any = "auto",
    sharding: Shardings = None,
    overwrite: bool = False,
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    progress: bool = True,
) -> Path:
    """Writes a model as another directory, with its configuration, tokenizer and sampling defaults.

    Args:
        source: any reference that `load_model` can load; for Hugging Face's form, a directory with wide weights.
        target: the directory to make.
        form: Orbax or Hugging Face's; quantized, the latter has tensors as compressed-tensors writes them.
        dtype: `auto` keeps the checkpoint's.
        sharding: how to hold the parameters meanwhile; what is written can be restored with any other. Orbax only.
        overwrite: replace an existing Orbax directory.
        quantization: as for `load_model`.
        quantization_exclude: as for `load_model`.
        progress: show a bar.
    Returns:
        The directory.
    Raises:
        CheckpointError: the source cannot be loaded, the target exists, or the form has no place for a weight.
    """
    reference = resolve(source)
    if form not in get_args(Form):
        raise CheckpointError(f"form {form!r} is not known; allowed are {', '.join(get_args(Form))}")
    if form == "hugging-face":
        return _rewrite(reference, Path(target).expanduser(), dtype, quantization, quantization_exclude)
    if _is_auto(dtype):
        dtype = source_dtype(reference)
    model = load_model(
        source,
        dtype=dtype,
        sharding=sharding,
        quantization=quantization,
        quantization_exclude=quantization_exclude,
        progress=progress,
    )
    return save_orbax(target, model, files_from=reference.files, overwrite=overwrite, progress=progress)


def _rewrite(
    reference: Reference, target: Path, dtype: Any, quantization: str | None, exclude: Collection[str]
) -> Path:
    if reference.kind is ReferenceKind.ORBAX and quantization is None:
        model = load_model(reference.name, dtype=source_dtype(reference) if _is_auto(dtype) else dtype, progress=False)
        return save_hugging_face(target, model, reference.files)
    if reference.kind not in (ReferenceKind.HUGGING_FACE, ReferenceKind.DEMO):
        raise CheckpointError(f"{reference.name}: quantized weights are written from a Hugging Face directory only")
    if already := Checkpoint(reference.name).quantised_as():
        raise CheckpointError(f"{reference.name}: is quantized already ({already})")
    names = TensorSet(reference.files).names
    if any(name.startswith(TEXT_PREFIXES) for name in names):
        raise CheckpointError(
            f"{reference.name}: the text model of a multimodal one cannot be written in this form; use --form orbax"
        )
    config = as_stored(load_config(reference.name), names)
    sources = weight_names(config)
    return rewrite_hugging_face(
        reference.files,
        target,
        config,
        read_json(reference.files / "config.json"),
        sources,
        None if quantization is None else Selection(config, sources, quantization, exclude),
        dtype=None if _is_auto(dtype) else jnp.dtype(dtype),
    )


def _is_auto(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == "auto"
