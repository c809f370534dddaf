"""New values for the parameters of a loaded model, for example from a trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from checkpoints.errors import CheckpointError, listing
from checkpoints.placing import abstract_parameters, place
from checkpoints.quantized.rounding import Selection, largest_of
from checkpoints.quantized.stored import Tensors
from checkpoints.tensors.hugging_face import match_sources, readable
from checkpoints.tensors.tensor_set import TensorSet
from mamba_jax.config import HybridConfig
from mamba_jax.families import TEXT_PREFIXES, ignored, weight_names
from mamba_jax.families.base import HFSource
from mamba_jax.modules.quantized import weight_of

NewWeights = Mapping[str, Any] | Iterable[tuple[str, Any]] | str | Path | TensorSet
"""Arrays by name (ours, the dotted paths of `mamba_jax.model.parameters`, or those of a Hugging Face checkpoint), pairs
of a name and an array, or the path of a directory with safetensors files, which `open_weights` has opened or not."""

_WHERE = "the new weights"
_AT_ONCE = 1 << 24
_DTYPES = ("float32", "bfloat16", "float16")


def open_weights(directory: str | Path) -> TensorSet:
    """Opens and reads the files of a directory, for threads that must not wait for a disk.

    Raises:
        CheckpointError: there are no safetensors files, or one cannot be read.
    """
    tensors = TensorSet(Path(directory), prefixes=TEXT_PREFIXES)
    tensors.read_ahead()
    return tensors


def repeatable(given: NewWeights) -> Mapping[str, Any] | list[tuple[str, Any]] | str | Path | TensorSet:
    """Returns the values in a form that can be read several times: an iterator of pairs becomes a list."""
    return given if isinstance(given, str | Path | Mapping | TensorSet) else list(given)


class GivenTensors:
    """Arrays of NumPy or JAX by name."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """
        Raises:
            CheckpointError: a value is not an array of floating-point numbers, or is a donated JAX array.
        """
        wrong = [f"{name} is {_kind(array)}" for name, array in arrays.items() if _kind(array) not in _DTYPES]
        if wrong:
            raise CheckpointError(f"{_WHERE}: {len(wrong)} of the wrong dtype ({', '.join(_DTYPES)}): {listing(wrong)}")
        self._arrays = dict(arrays)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._arrays[name].shape)

    def view(self, name: str) -> np.ndarray:
        """Its values; brought to the host if they are not there."""
        return np.asarray(self._arrays[name])

    def on_device(self, name: str) -> jax.Array | None:
        """Returns the tensor, if it is an array of JAX."""
        found = self._arrays[name]
        return found if isinstance(found, jax.Array) else None

    def release(self, name: str) -> None:
        """Releases a tensor after its last use."""
        self._arrays[name] = np.empty(0)


def given_tensors(given: NewWeights) -> Tensors:
    """Returns the given tensors by name. Collects pairs first, so that all are checked before any is replaced.

    Raises:
        CheckpointError: a name is repeated, a value is not an array, or there are no safetensors files.
    """
    if isinstance(given, TensorSet):
        return given
    if isinstance(given, str | Path):
        return TensorSet(Path(given), prefixes=TEXT_PREFIXES)
    if isinstance(given, Mapping):
        return GivenTensors(given)
    found: dict[str, Any] = {}
    for name, array in given:
        if name in found:
            raise CheckpointError(f"{_WHERE}: {name} comes twice")
        found[name] = array
    return GivenTensors(found)


def new_parameters(
    config: HybridConfig,
    held: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    tensors: Tensors,
    *,
    quantization: str | None = None,
    quantization_exclude: Collection[str] = (),
    partial: bool = False,
) -> Iterator[tuple[str, jax.Array]]:
    """Returns a model's parameters made from other tensors, one at a time, each as a copy with its sharding.

    Raises all errors before the first parameter. Floating-point numbers are converted to the dtype of the model, as
    when a checkpoint is loaded.

    Args:
        config: of the model.
        held: its parameters as they are, or abstract, by dotted path.
        tensors: by our names or by those of a Hugging Face checkpoint.
        quantization, quantization_exclude: the options that the model was loaded with; new weights are rounded equally.
        partial: allow missing tensors.
    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape, all in one line; the model's weights are
            stored quantized; or they are to be rounded and are not finite.
    """
    if quantization is None and any(weight_of(path) for path in held):
        raise CheckpointError(
            "weights that a checkpoint has stored quantized cannot be replaced: load a wide one, with quantization=..."
        )
    wide = abstract_parameters(config, jnp.float32)
    # A few names, such as lm_head.weight, are the same in both.
    ours = 2 * len(tensors.names & wide.keys()) > len(tensors.names)
    sources = {path: HFSource((path,)) for path in wide} if ours else weight_names(config)
    wide = {
        path: jax.ShapeDtypeStruct(leaf.shape, getattr(held.get(path), "dtype", leaf.dtype))
        for path, leaf in wide.items()
    }
    if partial:
        spellings = ((path, each) for path, source in sources.items() for each in (source, *source.alternatives))
        given = {path for path, each in spellings if tensors.names & {*each.names}}
        wide = {path: leaf for path, leaf in wide.items() if path in given}
    if not wide:
        raise CheckpointError(f"{_WHERE}: there are none")
    found = match_sources(_WHERE, tensors, wide, sources, () if ours else ignored(config))
    if quantization is None:
        return _place(found, wide, held, tensors, None, {})
    selection = Selection(config, weight_names(config), quantization, quantization_exclude)
    together = _together(config, tensors, wide, selection) if ours else {}
    _check_finite(tensors, {name for source in found.values() for name in source.names})
    return _place(found, wide, held, tensors, selection, together)


def _together(
    config: HybridConfig, tensors: Tensors, wide: Mapping[str, jax.ShapeDtypeStruct], selection: Selection
) -> dict[str, Callable[[], np.ndarray]]:
    """Returns the largest magnitudes of the published tensor that each nvfp4 weight is a part of, by our names."""
    parts: dict[tuple[str, ...], list[str]] = {}
    published = {path: source for path, source in weight_names(config).items() if source.rows is not None}
    for path, source in published.items():
        parts.setdefault(source.names, []).append(path)
    found: dict[str, Callable[[], np.ndarray]] = {}
    of_tensor: dict[tuple[str, ...], Callable[[], np.ndarray]] = {}
    for path in published.keys() & wide.keys():
        rounding = selection.of(path, wide[path].shape)
        if rounding is None or rounding.kind != "nvfp4":
            continue
        names = published[path].names
        own = parts[names]
        if missing := [other for other in own if other not in tensors.names]:
            raise CheckpointError(
                f"{_WHERE}: nvfp4 scales {path} together with {listing(missing)}: send them in the same update"
            )
        matrices = len(published[path].stored(wide[path].shape)) > 2
        # Computed for the first part that is read: later, parts that were placed are released.
        found[path] = of_tensor.setdefault(names, cache(partial(_largest_of_parts, tensors, own, matrices)))
    return found


def _largest_of_parts(tensors: Tensors, paths: Collection[str], matrices: bool) -> np.ndarray:
    """Returns the largest magnitude of all parts of a tensor, or of each of its matrices."""
    found = [largest_of(tensors.view(path)) for path in paths]
    return np.maximum.reduce(found) if matrices else np.max([each.max() for each in found])


def _check_finite(tensors: Tensors, names: Collection[str]) -> None:
    """Raises `CheckpointError` for tensors with NaN or infinity: rounded, they would be any numbers."""
    arrays: dict[str, jax.Array] = {}
    for name in names:
        array = tensors.on_device(name) if isinstance(tensors, GivenTensors) else None
        if array is not None:
            arrays[name] = jnp.isfinite(array).all()
    finite = jax.device_get(arrays)
    wrong = [name for name in names if not (finite[name] if name in finite else _is_finite(tensors.view(name)))]
    if wrong:
        raise CheckpointError(f"{_WHERE}: {len(wrong)} with NaN or infinity: {listing(sorted(wrong))}")


def _is_finite(values: np.ndarray) -> bool:
    flat = values.reshape(-1)
    return all(np.isfinite(flat[start : start + _AT_ONCE]).all() for start in range(0, flat.size, _AT_ONCE))


def _place(
    found: Mapping[str, HFSource],
    wide: Mapping[str, jax.ShapeDtypeStruct],
    held: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    tensors: Tensors,
    selection: Selection | None,
    together: Mapping[str, Callable[[], np.ndarray]],
) -> Iterator[tuple[str, jax.Array]]:
    last_use = {name: path for path, source in found.items() for name in source.names}

    def shardings(path: str) -> Any:
        # Weights on the default device stay uncommitted, as they are when they are loaded: compiled programs refuse
        # committed arrays of 4-bit numbers (JAX 0.10).
        sharding = held[path].sharding
        return None if sharding == SingleDeviceSharding(jax.devices()[0]) else sharding

    for path, source in found.items():
        moved = _moved(path, source, held, tensors)
        if moved is not None:
            yield path, moved
        else:
            parts = readable(tensors, path, wide[path], source, {}, selection, shardings, largest=together.get(path))
            for part, (target, reader) in parts.items():
                yield part, place(target, reader, shardings(part))
        for name in source.names:
            if last_use[name] == path:
                tensors.release(name)


def _moved(
    path: str, source: HFSource, held: Mapping[str, jax.Array | jax.ShapeDtypeStruct], tensors: Tensors
) -> jax.Array | None:
    """Copies a parameter that is one whole JAX array from device to device. Never aliases: trainers donate arrays."""
    if path not in held or source.rows is not None or source.stack or not isinstance(tensors, GivenTensors):
        return None
    given, target = tensors.on_device(source.names[0]), held[path]
    if given is None:
        return None
    return jax.device_put(given.reshape(target.shape).astype(target.dtype), target.sharding, may_alias=False)


def _kind(array: Any) -> str:
    """Returns a dtype's name, or describes a value that should be an array and is not."""
    if isinstance(array, jax.Array) and array.is_deleted():
        return "deleted (donated to a computation)"
    dtype = getattr(array, "dtype", None)
    return type(array).__name__ if dtype is None else str(dtype)
