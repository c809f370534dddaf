"""Reading fields of a config.json, with Hugging Face's defaults for absent ones and clear errors for wrong ones.

Of multimodal checkpoints only the text model is served: its part of config.json is read, and tensors of the other
towers (vision, audio, projectors) are left out.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any, cast

from mamba_jax.config import ModelConfigError

PUBLISHED: Mapping[str, Any] = tomllib.loads((files(__package__) / "published.toml").read_text(encoding="utf-8"))
"""What is known of each family of this package."""


class Fields:
    """A config.json. A field that is absent or null has its default, or is None; `aliases` are older names of it.

    `defaults` are those of a family, which precede those that a reader of a field gives. One of
    `max_position_embeddings`, or `positions`, is the length that rotary embeddings are scaled by.
    """

    def __init__(self, raw: Mapping[str, Any], *, positions: int = 0, defaults: Mapping[str, Any] = {}) -> None:
        self._raw, self._defaults = raw, defaults
        if positions := defaults.get("max_position_embeddings", positions):
            longest = self.integer("max_position_embeddings", positions, "model_max_length")
            self._raw = {**raw, "max_position_embeddings": longest}

    @classmethod
    def of(cls, raw: Mapping[str, Any], family: str) -> Fields:
        """Returns the fields with the defaults that `PUBLISHED` has under this name."""
        groups = PUBLISHED[family]["defaults"].values()
        return cls(raw, defaults={name: value for group in groups for name, value in group.items()})

    @property
    def raw(self) -> Mapping[str, Any]:
        """The fields as they are in the file."""
        return self._raw

    def given(self, name: str, *aliases: str) -> Any:
        """Returns the value under the first of these names that has one, or None."""
        return next((self._raw[key] for key in (name, *aliases) if self._raw.get(key) is not None), None)

    def explicit_null(self, name: str) -> bool:
        """Returns whether the field is present and null."""
        return name in self._raw and self._raw[name] is None

    def integer(self, name: str, default: int | None = None, *aliases: str) -> int:
        """Returns a whole number."""
        value: Any = self._checked("a whole number", _is_whole, default, name, *aliases)
        return cast(int, value if value is None else int(value))

    def number(self, name: str, default: float | None = None, *aliases: str) -> float:
        """Returns a number, possibly infinite."""
        value = self.given(name, *aliases)
        found: float = self._default(name, default) if value is None else _number(name, value)
        return found

    def numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Returns a list of numbers of the same length as the default."""

        def accepts(value: Any) -> bool:
            return isinstance(value, list | tuple) and len(value) == len(default)

        value = self._checked(f"a list of {len(default)} numbers", accepts, default, name)
        return tuple(_number(name, one) for one in value)

    def flag(self, name: str, default: bool = False, *aliases: str) -> bool:
        """Returns true or false."""
        return bool(self._checked("true or false", lambda value: isinstance(value, bool), default, name, *aliases))

    def text(self, name: str, default: str | None = None, *aliases: str) -> str:
        """Returns a string."""
        return str(self._checked("a string", lambda value: isinstance(value, str), default, name, *aliases))

    def strings(self, name: str, *aliases: str) -> list[str] | None:
        """Returns a list of strings, or None."""
        is_text = _is_list_of(lambda one: isinstance(one, str))
        found: list[str] | None = self._checked("a list of strings", is_text, None, name, *aliases)
        return found

    def integers(self, name: str, default: list[int]) -> list[int]:
        """Returns a list of whole numbers."""
        return [int(one) for one in self._checked("a list of whole numbers", _is_list_of(_is_whole), default, name)]

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns an object; an empty one if the field is absent."""
        found: Mapping[str, Any] = self._checked("an object", lambda value: isinstance(value, Mapping), {}, name)
        return found

    def _checked(self, expected: str, accepts: Callable[[Any], bool], default: Any, *names: str) -> Any:
        """Returns the value under the first of these names that has one, or the default."""
        key = next((name for name in names if self._raw.get(name) is not None), None)
        if key is None:
            return self._default(names[0], default)
        if not accepts(self._raw[key]):
            raise ModelConfigError(f"config field {key} is {self._raw[key]!r}: {expected} is expected")
        return self._raw[key]

    def _default(self, name: str, given: Any) -> Any:
        """Returns the family's default of a field; `given` where it has none."""
        return self._defaults.get(name, given)

    def tokens(self, name: str, default: int | None) -> tuple[int, ...]:
        """One token id, several, or none, which may be -1 too."""

        def accepts(value: Any) -> bool:
            return _is_whole(value) or _is_list_of(_is_whole)(value)

        value = self._checked("a whole number or a list of them", accepts, None, name)
        found = value if isinstance(value, list) else [self.token(name, default)]
        return tuple(int(one) for one in found if one is not None and one >= 0)

    def layers(self, kinds: Mapping[str, str], name: str, *aliases: str, count: int | None = None) -> str | None:
        """A list of layer types, each as its character or characters in the pattern; None if the field is absent.

        `count` is the number of layers that is expected, if it is known.
        """
        types = self.strings(name, *aliases)
        if types is None:
            return None
        if unknown := sorted(set(types) - set(kinds)):
            raise ModelConfigError(f"config field {name} has the layer types {unknown}: known are {', '.join(kinds)}")
        if count is not None and len(types) != count:
            raise ModelConfigError(f"config field {name} has {len(types)} entries, for {count} layers")
        return "".join(kinds[one] for one in types)

    def only(self, name: str, supported: tuple[Any, ...], *aliases: str) -> None:
        """Refuses values other than these and null of a field that is not used."""
        value = self.given(name, *aliases)
        if value is not None and value not in supported:
            raise ModelConfigError(
                f"config field {name} is {value!r}: only {' or '.join(map(repr, supported)) or 'null'} is supported"
            )

    def token(self, name: str, default: int | None) -> int | None:
        """One token id, or none."""
        absent = None if self.explicit_null(name) else self._default(name, default)
        return absent if self.given(name) is None else self.integer(name, 0)

    def key_value_heads(self, heads: int, default: int | None = None) -> int:
        """`num_key_value_heads`: null, and a default of None, mean the number of query heads."""
        if self.given(name := "num_key_value_heads") is not None:
            return self.integer(name)
        return heads if self.explicit_null(name) else int(self._default(name, default) or heads)


def _is_whole(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _number(name: str, value: Any) -> float:
    # Hugging Face writes infinity as {"__float__": "Infinity"}.
    if isinstance(value, Mapping) and isinstance(value.get("__float__"), str):
        value = float(value["__float__"])
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ModelConfigError(f"config field {name} is {value!r}: a number is expected")
    return float(value)


TEXT_KEYS = ("text_config", "llm_config")
"""Fields of config.json that hold the text model's config, possibly nested."""

WRAPPER = "wrapper_model_type"
"""The field of `text_fields` that holds the outermost `model_type` of a config.json with a text model's part."""

TEXT_PREFIXES = ("language_model.", "llm.")
"""Prefixes of the text model's tensors that come before the names which the model has by itself."""

OTHER_TOWERS = (
    r"(?:model\.)?((?:vision|audio|video|image|sound|speech)(?:_\w+)?|visual|vpm|apm|resampler|mlp1|merger|vit_merger"
    r"|multi_modal_projector|mm_projector|time_series|embed_(?:vision|audio))(?:\..*)?"
)
"""Regular expression (full match) of tensors of other towers; its group is the tower."""


def text_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields of a config.json: those under `TEXT_KEYS`, then the outer ones that they do not set.

    `model_type` is the outer one where the text model's config has none.

    Raises:
        ModelConfigError: the value under such a key is not an object.
    """
    while (key := next((key for key in TEXT_KEYS if raw.get(key) is not None), None)) is not None:
        text = raw[key]
        if not isinstance(text, Mapping):
            raise ModelConfigError(f"config field {key} is {text!r}: an object is expected")
        wrapper = raw.get(WRAPPER, raw.get("model_type"))
        raw = {**{name: value for name, value in raw.items() if name != key}, **text}
        if wrapper is not None and wrapper != raw.get("model_type"):
            raw[WRAPPER] = wrapper
    return raw


def other_towers(names: Iterable[str]) -> dict[str, int]:
    """Returns how many of these tensors belong to each of the other towers."""
    found = (re.fullmatch(OTHER_TOWERS, name) for name in names)
    return dict(sorted(Counter(match[1] for match in found if match is not None).items()))
