"""From one kind of checkpoint to another, and from a Hugging Face directory to one in another dtype or quantized.

Quantized weights are written as compressed-tensors writes them: their tensors, and their fields in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from checkpoints.errors import CheckpointError, listing
from checkpoints.export import copy_small_files, save_hugging_face
from checkpoints.json_file import read_json
from checkpoints.load import Checkpoint, load_config, load_model, source_dtype
from checkpoints.orbax import save_orbax
from checkpoints.placing import Shardings, abstract_parameters
from checkpoints.quantized.description import COMPRESSED
from checkpoints.quantized.packing import pack, pack_fp4
from checkpoints.quantized.rounding import Rounding, Selection
from checkpoints.quantized.stored import F32, InvalidTensor
from checkpoints.resolve import Reference, ReferenceKind, resolve
from checkpoints.tensors.tensor_set import TensorFiles, TensorSet
from mamba_jax.config import HybridConfig
from mamba_jax.families import TEXT_PREFIXES, as_stored, weight_names
from mamba_jax.families.base import HFSource

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
    auto = isinstance(dtype, str) and dtype == "auto"
    if form == "hugging-face" and (quantization is not None or reference.kind is not ReferenceKind.ORBAX):
        wanted = None if auto else jnp.dtype(dtype)
        return _rewrite(reference, Path(target).expanduser(), wanted, quantization, quantization_exclude)
    dtype = source_dtype(source) if auto else dtype
    model = load_model(
        source,
        dtype=dtype,
        sharding=sharding,
        quantization=quantization,
        quantization_exclude=quantization_exclude,
        progress=progress and form == "orbax",
    )
    if form == "hugging-face":
        return save_hugging_face(target, model, reference.files)
    return save_orbax(target, model, files_from=reference.files, overwrite=overwrite, progress=progress)


def _rewrite(
    reference: Reference, target: Path, dtype: np.dtype | None, quantization: str | None, exclude: Collection[str]
) -> Path:
    """Writes a directory whose weights are those that loading the source with these options would make.

    Names stay as they are. Tensors that the model keeps in float32 stay so in any `dtype`.
    """
    if reference.kind not in (ReferenceKind.HUGGING_FACE, ReferenceKind.DEMO):
        raise CheckpointError(f"{reference.name}: quantized weights are written from a Hugging Face directory only")
    if already := Checkpoint(reference.name).quantized_as():
        raise CheckpointError(f"{reference.name}: is quantized already ({already})")
    tensors = TensorSet(reference.files)
    if any(name.startswith(TEXT_PREFIXES) for name in tensors.names):
        raise CheckpointError(
            f"{reference.name}: the text model of a multimodal one cannot be written in this form; use --form orbax"
        )
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists already and is not empty")
    config = as_stored(load_config(reference.name), tensors.names)
    sources = weight_names(config)
    found = {path: source for path, each in sources.items() if (source := each.find(tensors.names)) is not None}
    selection = None if quantization is None else Selection(config, sources, quantization, exclude)
    roundings = {} if selection is None else _by_tensor(config, found, selection)
    targets = {} if dtype is None else abstract_parameters(config, dtype)
    wanted = {name: targets[path].dtype for path, source in found.items() if targets for name in source.names}
    target.mkdir(parents=True, exist_ok=True)
    files = TensorFiles(target)
    for name in sorted(tensors.names):
        rounding, value = roundings.get(name), tensors.view(name)
        if rounding is None:
            files.add(name, value.astype(wanted.get(name, value.dtype)))
        else:
            try:
                parts = tensors_of(rounding, value)
            except InvalidTensor as error:
                raise CheckpointError(f"{name}: {error}; exclude it, or write Orbax") from None
            for suffix, part in parts.items():
                files.add(f"{name.removesuffix('.weight')}.{suffix}", part)
        tensors.release(name)
    files.close()
    described = read_json(reference.files / "config.json")
    if dtype is not None:
        described["dtype"] = dtype.name
    rounded = {name.removesuffix(".weight"): rounding for name, rounding in roundings.items()}
    matrices = [name for name in tensors.names if name.endswith(".weight") and len(tensors.shape(name)) == 2]
    wide = {name.removesuffix(".weight") for name in matrices}
    if selection is not None:
        described["quantization_config"] = description_of(rounded, wide - set(rounded))
    (target / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    copy_small_files(reference.files, target)
    return target


def _by_tensor(config: HybridConfig, found: Mapping[str, HFSource], selection: Selection) -> dict[str, Rounding]:
    """Returns how each stored tensor is rounded."""
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config, np.float32).items()}
    of_tensor: dict[str, dict[str, Rounding | None]] = {}
    for path, source in found.items():
        for name in source.names:
            of_tensor.setdefault(name, {})[path] = selection.of(path, shapes[path])
    roundings: dict[str, Rounding] = {}
    for name, each in of_tensor.items():
        kinds = set(each.values())
        if len(kinds) > 1:
            wide = [path for path, rounding in each.items() if rounding is None]
            raise CheckpointError(
                f"{name} holds several weights, of which {listing(wide)} would stay wide: exclude all"
            )
        (rounding,) = kinds
        if rounding is None:
            continue
        if not name.endswith(".weight"):
            raise CheckpointError(f"{name}: is no module's weight, which is all that this form has; write Orbax")
        roundings[name] = rounding
    return roundings


_FORMATS = {
    "int8": ("int-quantized", "channel", 8),
    "fp8": ("float-quantized", "channel", 8),
    "int4": ("pack-quantized", "group", 4),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", 4),
}
"""The format's name, what has a scale, and bits."""
_PACKED_AT_ONCE = 8


def tensors_of(rounding: Rounding, wide: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the tensors of a module, by suffix, that represent a weight [*lead, outputs, inputs].

    Raises:
        InvalidTensor: the format has no such weights.
    """
    if rounding.kind == "int4" and (wide.ndim != 2 or wide.shape[-1] % _PACKED_AT_ONCE):
        raise InvalidTensor(
            f"int4 in compressed-tensors' form is for matrices of whole words, and this is {list(wide.shape)}"
        )
    parts = rounding.round(wide)
    values = parts["values"]
    if rounding.kind in ("int8", "fp8"):
        return {"weight": values, "weight_scale": parts["channel_scale"][..., None].astype(F32)}
    by_output = np.ascontiguousarray(np.swapaxes(parts["group_scale"], -1, -2))
    if rounding.kind == "int4":
        codes = (values.astype(np.int8) + 8).astype(np.uint8)
        shape = np.asarray(wide.shape, np.int64)
        return {"weight_packed": pack(codes, 4), "weight_scale": by_output, "weight_shape": shape}
    of_tensor = np.atleast_1d(np.reciprocal(parts["channel_scale"][..., 0]))
    return {"weight_packed": pack_fp4(values), "weight_scale": by_output, "weight_global_scale": of_tensor}


def description_of(rounded: Mapping[str, Rounding], ignored: Collection[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint.

    Args:
        rounded: by the names of modules.
        ignored: names of the modules whose weights are wide.
    """
    kinds = sorted(set(rounded.values()), key=lambda each: each.group)
    groups = {}
    for number, kind in enumerate(kinds):
        modules = sorted(name for name, own in rounded.items() if own == kind)
        _, strategy, bits = _FORMATS[kind.kind]
        weights = {
            "num_bits": bits,
            "type": "float" if "fp" in kind.kind else "int",
            "strategy": strategy,
            "group_size": kind.group or None,
            "symmetric": True,
            "dynamic": False,
        }
        groups[f"group_{number}"] = {"targets": ["Linear"] if len(kinds) == 1 else modules, "weights": weights}
    return {
        "quant_method": COMPRESSED,
        "format": _FORMATS[kinds[0].kind][0] if kinds else "dense",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(ignored),
    }
