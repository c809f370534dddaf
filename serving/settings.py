"""The base class of all settings, which validates a table of values and formats errors, and files of such tables."""

from __future__ import annotations

import difflib
import functools
import json
import numbers
import operator
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_text
from serving.core.errors import ConfigError, RequestError

T = TypeVar("T")

_LARGEST = 1e9
"""Of settings that are not whole numbers. Many are seconds, and Python's locks wait at most about 9e9."""


class Settings(BaseModel):
    """Frozen settings, each defined once: for Python keywords, command-line options and configuration files.

    The field order is the order of the command line's help; a field's docstring, or its description, is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    COMMON: ClassVar[tuple[str, ...]] = ()
    """Fields whose options `--help` shows; `--help-all` shows the others too."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split()) or None

    @classmethod
    def create(cls, **values: Any) -> Self:
        """Creates validated settings. None counts as unset; a string for a list is its only item.

        Raises:
            ConfigError: an unknown name or an invalid value.
        """
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            if name not in cls.model_fields:
                raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, cls.model_fields)}")
            if isinstance(value, str) and get_origin(cls.model_fields[name].annotation) is tuple:
                given[name] = (value,)
        try:
            made = cls(**given)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_explain, error.errors()))) from None
        for name in given:
            if isinstance(value := getattr(made, name), float) and value > _LARGEST:
                raise ConfigError(f"{name}: must be at most {_LARGEST:g}, got {value:g}")
        return made


def did_you_mean(name: str, known: Any) -> str:
    """Returns the end of an error message that suggests the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _only(kind: type, what: str) -> BeforeValidator:
    """Refuses what pydantic would convert: texts, booleans, and numbers of another kind."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise PydanticCustomError("kind", "must be {what}", {"what": what})
        # Pydantic reads NumPy's integers as floats.
        return operator.index(value) if kind is numbers.Integral else value  # type: ignore[arg-type]

    return BeforeValidator(check)


def listed(kind: type, what: str, most: int | None = None, filled: bool = False) -> Callable[[Any], list[Any]]:
    """Refuses all but lists of a kind, up to a length. Pydantic would make an error for each of a million items.

    With `filled`, neither the list nor an item may be empty.
    """

    def check(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise PydanticCustomError("kind", "must be a list of {what}", {"what": what})
        if most is not None and len(value) > most:
            raise PydanticCustomError("length", "must have at most {most} items", {"most": most})
        wrong = filled and not value
        if wrong or any(isinstance(x, bool) or not isinstance(x, kind) or (filled and not x) for x in value):
            raise PydanticCustomError("kind", "must be a list of {what}", {"what": what})
        return list(value)

    return check


def _object(value: Any) -> Any:
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("json", "must be valid JSON ({why})", {"why": str(error)}) from None
    if not isinstance(found, Mapping):
        raise PydanticCustomError("json", "must be a JSON object")
    return found


JsonObject = Annotated[dict[str, Any], BeforeValidator(_object)]
"""An object, or its JSON text; an empty text counts as `{}`."""
Integer = Annotated[int, _only(numbers.Integral, "an integer")]
Number = Annotated[float, _only(numbers.Real, "a number")]


def checks_names(
    what: str, nearest: Mapping[str, str], is_neutral: Callable[[str, Any], bool], before: str = ""
) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass of requests refuse unknown names, and values that pydantic refuses, by a `RequestError`.

    Args:
        what: what its fields are, in messages.
        nearest: vLLM's names that are not supported, and the nearest way.
        is_neutral: whether a value of one of these asks for nothing; it is then ignored.
        before: what messages about values begin with.
    """

    def checked(kind: type[T]) -> type[T]:
        create = kind.__init__

        @functools.wraps(create)
        def init(self: T, /, *args: Any, **values: Any) -> None:
            names: Mapping[str, Any] = vars(kind)["__dataclass_fields__"]
            for name in values.keys() - names.keys():
                if name not in nearest:
                    raise RequestError(f"unknown {what} {name[:64]!r}{did_you_mean(name[:64], names)}")
                if not is_neutral(name, values[name]):
                    raise RequestError(f"{name} is not supported: {nearest[name]}")
            try:
                create(self, *args, **{name: value for name, value in values.items() if name in names})
            except ValidationError as error:
                first = error.errors()[0]
                cause = first.get("ctx", {}).get("error")
                raise cause if isinstance(cause, RequestError) else RequestError(before + _explain(first)) from None

        setattr(kind, "__init__", init)  # noqa: B010  # mypy does not allow an assignment to it
        return kind

    return checked


def read_config_file(path: Path | str) -> Mapping[str, Any]:
    """Reads engine flags from a YAML or TOML file; dashes in names count as underscores.

    Raises:
        ConfigError: the file cannot be read, is in another format, or does not contain a table of flags.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load
    }  # fmt: skip
    read = readers.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"config file {path}: its name must end in .yaml, .yml or .toml, not {path.suffix!r}")
    try:
        flags = read(read_text(path)) or {}
    except CheckpointError as error:
        raise ConfigError(f"config file {error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {path}: {' '.join(str(error).split())}") from None
    if not isinstance(flags, dict):
        raise ConfigError(f"config file {path}: expected a table of flags, got {type(flags).__name__}")
    return {str(name).replace("-", "_"): value for name, value in flags.items()}


def _explain(detail: Any) -> str:
    """Formats one of pydantic's errors as a short clause with the name, the allowed values and the value."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"]) if "error" in detail.get("ctx", {}) else detail["msg"]
    message = re.sub(r"^\w+ should ", "must ", detail["msg"]).replace(" after validation", "")
    return f"{detail['loc'][0]}: {message[0].lower()}{message[1:]}, got {reprlib.repr(detail['input'])}"


def yaml_assignment(option: str, text: str, form: str = "NAME=VALUE") -> tuple[str, Any]:
    """Returns the name, and the value in YAML, of an option's text of this form.

    Raises:
        ConfigError: the text is not of this form.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{option} {text}: expected {form}")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option} {text}: not a value in YAML: {' '.join(str(error).split())}") from None


def json_value(name: str, text: str) -> Any:
    """Returns the value of a flag in JSON.

    Raises:
        ConfigError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON ({error}): {text[:80]}") from None


def json_object(name: str, text: str) -> dict[str, Any]:
    """Returns the value of a flag that is a JSON object. Raises ConfigError if it is none."""
    value = json_value(name, text)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, got {text[:80]}")
    return value
