"""The engine's flags as command-line options, generated from `EngineConfig` so that they are defined in one place."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from serving.config import EngineConfig, read_config_file

_COUNT = re.compile(r"(?P<number>[+-]?\d+(\.\d+)?)(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


def with_engine_options(command: Callable[..., None], *, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """Adds `--config` and an option for each engine flag to a command that takes a keyword `flags`.

    `flags` then holds the flags that were given: those of the file, overridden by those of the command line.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    names = [name for name in EngineConfig.model_fields if name not in without]

    @functools.wraps(command)
    def wrapped(*, config: Path | None = None, **given: Any) -> None:
        options = {name: given.pop(name) for name in names}
        flags = dict(read_config_file(config)) if config is not None else {}
        flags.update({name: value for name, value in options.items() if value is not None})
        command(**given, flags=flags)

    file = typer.Option(help="YAML or TOML file of engine flags.", rich_help_panel="Engine", show_default=False)
    parameters = [*own, _parameter("config", Path, file), *(_flag(name) for name in names)]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _flag(name: str) -> inspect.Parameter:
    """One engine flag as an option; None if not given on the command line, whatever the default."""
    field = EngineConfig.model_fields[name]
    kind = _plain_type(field.annotation)
    default = "" if field.default is None else f" [dim]\\[default: {field.default}][/dim]"
    dashed = name.replace("_", "-")
    spelling = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    info = typer.Option(
        spelling,
        parser=whole_number if kind is int else None,
        help=f"{field.description}{default}",
        rich_help_panel="Engine",
        show_default=False,
        metavar="INTEGER" if kind is int else _choices(field.annotation),
    )
    return _parameter(name, kind, info)


def whole_number(text: str | int) -> int:
    """A count as people write it: 32768, 32k (thousands), 32K (1,024 each), and so on with m and M.

    Raises:
        typer.BadParameter: it is none.
    """
    found = _COUNT.fullmatch(str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a whole number (32768, 32k for thousands, 32K for 1,024 each)")
    number = float(found["number"]) * _UNITS[found["unit"]]
    if not number.is_integer():
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(number)


def _parameter(name: str, kind: type, info: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _members(annotation: Any) -> list[Any]:
    """The members of a union, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for member in get_args(annotation) if member is not types.NoneType]
    return [annotation]


def _plain_type(annotation: Any) -> type:
    """The type that typer parses. Choices are plain strings: `EngineConfig` checks them with clearer errors."""
    (member,) = _members(annotation)
    return str if get_origin(member) is Literal else member


def _choices(annotation: Any) -> str | None:
    (member,) = _members(annotation)
    return "|".join(map(str, get_args(member))) if get_origin(member) is Literal else None
