"""`hf_overrides`: fields that replace fields of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError

_ROPE = ("rope_parameters", "rope_scaling")
_SPELLINGS = (_ROPE, ("rope_type", "type"), ("dtype", "torch_dtype"))
"""Names of the same field."""


def parse_overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Overrides as nested objects with sorted keys, from an object or its JSON text.

    A dotted key names a field of a nested object: `{"rope_parameters.factor": 4}`.

    Raises:
        CheckpointError: the text is not JSON, or the value is not an object.
    """
    try:
        found = json.loads(given) if isinstance(given, str) else given
        if not isinstance(found, Mapping):
            raise CheckpointError(f"hf_overrides: a JSON object is expected, not {str(found)[:80]}")
        return _nested(found)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"hf_overrides: not JSON ({error}): {str(given)[:80]}") from None
    except RecursionError:
        raise CheckpointError("hf_overrides: nested too deeply") from None


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        first, dot, rest = str(key).partition(".")
        inner = {rest: value} if dot else value
        found = merged(found, {first: _nested(inner) if isinstance(inner, Mapping) else inner})
    return dict(sorted(found.items()))


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with these overrides. Objects are merged, other values replaced.

    An override applies to the spelling of a field that config.json uses, also inside its `rope_parameters`.
    """
    found = dict(fields)
    for key, value in overrides.items():
        name = _spelling(key, found)
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merged(before, value) if both else value  # type: ignore[arg-type]
        for rope in _ROPE:
            if isinstance(found.get(rope), Mapping) and key in found[rope]:
                found[rope] = {**found[rope], key: value}
    return found


def _spelling(key: str, fields: Mapping[str, Any]) -> str:
    """Returns the spelling of `key` with a value in `fields`; `key` itself without one."""
    spellings = next((names for names in _SPELLINGS if key in names), ())
    return next((name for name in (key, *spellings) if fields.get(name) is not None), key)
