"""The text model's fields of a Hugging Face config.json, with `hf_overrides`; the sampling parameters that a checkpoint
recommends; and a `HybridConfig` as JSON, for checkpoints of our own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from checkpoints.errors import CheckpointError
from checkpoints.json_file import merged, read_json, read_json_if_present
from mamba_jax.config import HybridConfig, ModelConfigError, RecurrenceConfig
from mamba_jax.families import text_fields
from mamba_jax.families.fields import Fields

_KIND = "kind"
"""Which recurrence a description is of: the name of its class."""

_Config = TypeVar("_Config")


def read_text_fields(directory: Path, overrides: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Returns the fields of a directory's config.json, or of the text model's part of it, with `hf_overrides`.

    Raises:
        CheckpointError: the file cannot be read, or that part is not an object.
    """
    path = directory / "config.json"
    try:
        return overridden(text_fields(read_json(path)), overrides)
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def overridden(fields: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the text model's fields with `hf_overrides`, which may also be under `text_config`.

    Raises:
        ModelConfigError: the overrides' `text_config` is not an object.
    """
    return merged(fields, text_fields(overrides)) if overrides else fields


def config_to_json(config: HybridConfig) -> dict[str, Any]:
    """Nested dictionaries of plain values; infinity stays a float (Python's json reads and writes it)."""
    fields = dataclasses.asdict(config)
    for described, recurrence in zip(fields["recurrences"], config.recurrences, strict=True):
        described[_KIND] = type(recurrence).__name__
    return fields


def config_from_json(fields: Mapping[str, Any]) -> HybridConfig:
    """Returns the inverse of `config_to_json`.

    Raises:
        ValueError: a field is unknown, missing, or not allowed.
    """
    described = fields.get("recurrences", ()) if isinstance(fields, Mapping) else None
    if not isinstance(described, list | tuple):
        raise ValueError(f"HybridConfig: an object with a list of recurrences is expected, got {fields!r:.60}")
    return _read(HybridConfig, {**fields, "recurrences": [_recurrence(each) for each in described]})


def _recurrence(fields: Any) -> RecurrenceConfig:
    """Returns a recurrence by the name of its class; families import the classes that they use."""
    kinds = {kind.__name__: kind for kind in _subclasses(RecurrenceConfig)}
    name = fields.get(_KIND) if isinstance(fields, Mapping) else None
    if name not in kinds:
        raise ValueError(f"recurrence {name!r} is unknown: known are {', '.join(sorted(kinds))}")
    return _read(kinds[name], {field: value for field, value in fields.items() if field != _KIND})


def _subclasses(kind: type[RecurrenceConfig]) -> Iterator[type[RecurrenceConfig]]:
    """Yields the classes that have no further ones below them."""
    for below in kind.__subclasses__():
        yield from _subclasses(below) if below.__subclasses__() else (below,)


def _read(kind: type[_Config], fields: Any) -> _Config:
    # A dataclass by itself gets no settings; it takes those of the tuple that it is in.
    settings = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    reader = pydantic.TypeAdapter(tuple[kind], config=settings)  # type: ignore[valid-type]
    try:
        return reader.validate_python((fields,))[0]
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, (kind.__name__, *first["loc"][1:])))
        raise ValueError(f"{name}: {first['msg']}") from error


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults for sampling; None where the checkpoint does not say."""

    eos_token_ids: tuple[int, ...] = ()
    """Every id that ends a text."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation_config(directory: Path, overrides: Mapping[str, Any] | None = None) -> GenerationConfig:
    """Reads the recommendations of a directory; ids that end a text come from `config.json` where only that has them.

    Raises:
        CheckpointError: a file is broken, or a field has a value of the wrong kind.
    """
    path = directory / "generation_config.json"
    fields = read_json_if_present(path)
    eos = fields.get("eos_token_id")
    if eos is None:
        path = directory / "config.json" if not fields else path
        has_config = (directory / "config.json").is_file()
        eos = read_text_fields(directory, overrides).get("eos_token_id") if has_config else None
    # `do_sample: false` means greedy decoding. The other fields are then the library's defaults and have no effect.
    greedy = fields.get("do_sample") is False
    own: Any = Fields(fields)  # whose defaults may be None
    try:
        return GenerationConfig(
            eos_token_ids=tuple(dict.fromkeys(Fields({"eos_token_id": eos}).tokens("eos_token_id", None))),
            temperature=0.0 if greedy else own.number("temperature", None),
            top_p=own.number("top_p", None),
            top_k=own.integer("top_k", None),
            min_p=own.number("min_p", None),
            repetition_penalty=own.number("repetition_penalty", None),
            max_new_tokens=own.integer("max_new_tokens", None),
        )
    except ModelConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
