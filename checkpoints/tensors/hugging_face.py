"""Reads weights from Hugging Face tensors: checks all names and shapes, then reads one parameter at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from checkpoints.errors import CheckpointError, listing
from checkpoints.placing import Index, Reader, Shardings, nbytes, place, progress_bar, sharding_of
from checkpoints.quantized.parameters import Readable, own_rows, parts_of
from checkpoints.quantized.rounding import Selection, largest_of, rounded
from checkpoints.quantized.stored import StoredWeight, Tensors
from mamba_jax.families.base import HFSource

_log = logging.getLogger(__name__)


def read_parameters(
    where: str,
    tensors: Tensors,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, HFSource],
    *,
    ignored: Iterable[str] = (),
    quantized: Mapping[str, StoredWeight] | None = None,
    selection: Selection | None = None,
    shardings: Shardings = None,
    progress: bool = False,
) -> dict[str, jax.Array]:
    """Reads every parameter. At most one parameter at a time is in host memory before it is placed.

    A weight that is quantized in the checkpoint becomes the parameters that it consists of.

    Args:
        where: the name of the checkpoint in messages.
        tensors: the stored tensors.
        parameters: shape and dtype of each parameter by dotted path.
        sources: where each parameter is found.
        ignored: regular expressions (full match) of stored tensors that may be left over.
        quantized: tensors that stay quantized.
        selection: unquantized weights to be quantized.
        shardings: the sharding of each parameter.
        progress: show a bar.
    Raises:
        CheckpointError: tensors are missing, left over, or of the wrong shape; one message lists them all.
    """
    found = match_sources(where, tensors, parameters, sources, ignored)
    if unused := sorted(tensors.names - {name for source in found.values() for name in source.names}):
        _log.info("%s: ignoring %d unused tensors: %s", where, len(unused), listing(unused))
    last_use = {name: path for path, source in found.items() for name in source.names}
    parts_by_path = {
        path: readable(tensors, path, parameters[path], source, quantized or {}, selection, shardings)
        for path, source in found.items()
    }
    total = sum(nbytes(target) for parts in parts_by_path.values() for target, _ in parts.values())
    result = {}
    with progress_bar(f"Loading {Path(where).name}", total, progress) as advance:
        for path, source in found.items():
            parts = parts_by_path.pop(path)
            while parts:
                part, (target, reader) = parts.popitem()
                result[part] = place(target, reader, sharding_of(shardings, part))
                advance(nbytes(target))
            for name in source.names:
                if last_use[name] == path:
                    tensors.release(name)
    return result


def readable(
    tensors: Tensors,
    path: str,
    target: jax.ShapeDtypeStruct,
    source: HFSource,
    quantized: Mapping[str, StoredWeight],
    selection: Selection | None,
    shardings: Shardings,
    *,
    largest: Callable[[], np.ndarray] | None = None,
) -> dict[str, Readable]:
    """Returns the tensors to read for a parameter: itself, or the parts of a quantized weight.

    `largest` gives the largest magnitudes of the published tensor that a weight to be quantized is a part of, where
    `source` is the weight alone; see `rounded`.
    """
    narrow = [quantized[name] for name in source.names if name in quantized]
    # Experts of different forms become one wide weight: `tensors` gives the values that each stands for.
    if not narrow or len(narrow) < len(source.names) or any(each.form != narrow[0].form for each in narrow):
        rounding = None if selection is None else selection.of(path, target.shape)
        if rounding is None:
            return {path: (target, _reader(tensors, source, target))}
        # The stored numbers are rounded, not those that the dtype of the model's other weights leaves of them.
        target = jax.ShapeDtypeStruct(target.shape, np.float32)
        if largest is None and not source.stack:
            largest = lambda: largest_of(tensors.view(source.names[0]))  # noqa: E731
        return rounded(path, target, _reader(tensors, source, target), rounding, shardings, largest=largest)
    return parts_of(path, target.shape, source, narrow, shardings, release=tensors.release)


def parameter_shapes(
    tensors: Tensors,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, HFSource],
    quantized: Mapping[str, StoredWeight],
    shardings: Shardings,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the parameters that `read_parameters` reads, by dotted path."""
    found: dict[str, jax.ShapeDtypeStruct] = {}
    names = tensors.names
    for path, target in parameters.items():
        source = sources[path].find(names) or sources[path]
        parts = readable(tensors, path, target, source, quantized, None, shardings)
        found |= {part: own for part, (own, _) in parts.items()}
    return found


def _reader(tensors: Tensors, source: HFSource, target: jax.ShapeDtypeStruct) -> Reader:
    """Returns the function that reads pieces of one parameter."""
    shape, count = target.shape, len(source.names)

    def one(names: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        views = [tensors.view(name) for name in names]
        view = views[0] if len(views) == 1 else np.concatenate(views)
        return own_rows(source, view).reshape(shape)

    def read(index: Index) -> np.ndarray:
        if not source.names:
            return np.full(shape, source.default, target.dtype)[index]
        if not source.stack:
            return one(source.names, shape)[index]
        # Reads directly into the stacked array, so that no second copy of all experts exists.
        first, *rest = shape
        if math.prod(shape[:2]) > count < first:
            parts = [one((name,), (first // count, *rest)) for name in source.names]
            return np.concatenate(parts)[index].astype(target.dtype)
        axes = 1 if count == first else 2
        names = np.array(source.names, object).reshape(shape[:axes])[index[:axes]]
        lengths = [len(range(*s.indices(n))) for s, n in zip(index[axes:], shape[axes:], strict=True)]
        stacked = np.empty((*names.shape, *lengths), target.dtype)
        for entry, name in np.ndenumerate(names):
            stacked[entry] = one((name,), shape[axes:])[index[axes:]]
            tensors.release(name)
        return stacked

    return read


def match_sources(
    where: str,
    tensors: Tensors,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, HFSource],
    ignored: Iterable[str],
) -> dict[str, HFSource]:
    """Finds the source of each parameter in the file. Collects all disagreements before it raises an error.

    Raises:
        CheckpointError: see `read_parameters`.
    """
    names = tensors.names
    found: dict[str, HFSource] = {}
    used: set[str] = set()
    missing: dict[str, tuple[int, ...]] = {}
    wrong: dict[str, str] = {}
    for path, target in parameters.items():
        source = sources[path].find(names)
        if source is None and sources[path].default is not None:
            source = replace(sources[path], names=())
        if source is None:
            source = _likely(sources[path], names)
            used.update(source.names)
            missing |= {name: shape for name, shape in source.shapes(target.shape).items() if name not in names}
            continue
        found[path] = source
        used.update(source.names)
        expected = source.shapes(target.shape)
        # A file may cut a tensor elsewhere than its makers: only the sum of the first axes counts.
        pieces, whole = [tensors.shape(name) for name in source.names], source.stored(target.shape)
        same = all(piece[1:] == whole[1:] for piece in pieces)
        if source.cuts and same and sum(piece[0] for piece in pieces) == whole[0]:
            continue
        for name in source.names:
            if tensors.shape(name) != expected[name]:
                wrong[name] = f"{name} is {list(tensors.shape(name))}, expected {list(expected[name])}"
    skip = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))
    left = sorted(name for name in names - used if not skip.fullmatch(name))
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {listing(f'{n} {list(s)}' for n, s in missing.items())}")
    if wrong:
        problems.append(f"{len(wrong)} of the wrong shape: {listing(wrong.values())}")
    if left:
        problems.append(f"{len(left)} unexpected: {listing(f'{n} {list(tensors.shape(n))}' for n in left)}")
    if problems:
        raise CheckpointError(f"{where}: tensors do not fit config.json: {'; '.join(problems)}")
    return found


def _likely(source: HFSource, names: set[str]) -> HFSource:
    """Returns the spelling of an absent source that this checkpoint seems to use."""
    prefixes = {name.split(".")[0] for name in names}

    def fit(spelling: HFSource) -> tuple[int, int]:
        present = sum(name in names for name in spelling.names)
        return present, sum(name.split(".")[0] in prefixes for name in spelling.names)

    return max((source, *source.alternatives), key=fit)
