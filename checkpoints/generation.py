"""The sampling parameters that a checkpoint recommends: `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.config_json import read_text_fields
from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json_if_present


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
    return GenerationConfig(
        eos_token_ids=_ids(path, eos),
        temperature=0.0 if greedy else _number(path, fields, "temperature"),
        top_p=_number(path, fields, "top_p"),
        top_k=_whole(path, fields, "top_k"),
        min_p=_number(path, fields, "min_p"),
        repetition_penalty=_number(path, fields, "repetition_penalty"),
        max_new_tokens=_whole(path, fields, "max_new_tokens"),
    )


def _ids(path: Path, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id must be an integer or a list of integers, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _number(path: Path, fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{path}: {name} must be a number, not {value!r}")
    return float(value)


def _whole(path: Path, fields: dict[str, Any], name: str) -> int | None:
    value = _number(path, fields, name)
    if value is not None and not value.is_integer():
        raise CheckpointError(f"{path}: {name} must be a whole number, not {value!r}")
    return None if value is None else int(value)
