"""Command-line options generated from settings classes, so that each option is defined once."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from serving.cli.terminal import show_all
from serving.settings import Settings

_COUNT = re.compile(r"(?P<number>[+-]?\d+(\.\d+)?)(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


@dataclass(frozen=True)
class Options:
    """The options of one settings class."""

    keyword: str
    """The command's keyword that receives a dictionary of the options that were set."""
    settings: type[Settings]
    panel: str
    """Heading of the group in the help."""
    without: Collection[str] = ()
    """Fields without an option."""

    @property
    def names(self) -> list[str]:
        """The fields with an option."""
        return [name for name in self.settings.model_fields if name not in self.without]


def with_options(*groups: Options, config_file: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that replaces keywords of a command by options for the fields of settings classes.

    `config_file` adds `--config`; `serving.cli.main` reads that file before the command line is parsed.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        keywords = {group.keyword for group in groups}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in keywords]

        @functools.wraps(command)
        def wrapped(*, help_all: bool = False, config: Path | None = None, **values: Any) -> None:
            for group in groups:
                options = {name: values.pop(name) for name in group.names}
                values[group.keyword] = {name: value for name, value in options.items() if value not in (None, [])}
            command(**values)

        added = [_option(name, group) for group in groups for name in group.names]
        if config_file:
            info = typer.Option(help="YAML or TOML file of options, named as here without the leading dashes.")
            added.append(_parameter("config", Path | None, info))
        info = typer.Option("--help-all", help="Show all options.", is_eager=True, callback=show_all)
        added.append(_parameter("help_all", bool, info, False))
        wrapped.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *added]}
        return wrapped

    return decorate


def whole_number(text: str | int) -> int:
    """Returns the value of a count such as 32768, 32k (thousands), 32K (1,024 each), 2m or 2M.

    Raises:
        typer.BadParameter: the text is not a count.
    """
    count = _COUNT.fullmatch(str(text).strip())
    if count is None:
        raise typer.BadParameter(f"{text!r} is not a whole number (32768, 32k for thousands, 32K for 1,024 each)")
    number = float(count["number"]) * _UNITS[count["unit"]]
    if not number.is_integer():
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(number)


def _option(name: str, group: Options) -> inspect.Parameter:
    """Returns the option for a field. Its value is None if the command line does not set it."""
    field = group.settings.model_fields[name]
    kind, many, choices = _plain(field.annotation)
    dashed = name.replace("_", "-")
    info = typer.Option(
        f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
        parser=whole_number if kind is int else None,
        help=f"{field.description}{_default(field)}",
        rich_help_panel=group.panel,
        show_default=False,
        metavar="INTEGER" if kind is int else choices,
        hidden=name not in group.settings.COMMON,
    )
    return _parameter(name, list[kind] | None if many else kind | None, info)  # type: ignore[valid-type]


def _parameter(name: str, annotation: Any, info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _default(field: Any) -> str:
    if field.is_required() or field.default in (None, (), "") or "Unset:" in field.description:
        return ""
    if isinstance(field.default, bool):
        return f" [default: {'on' if field.default else 'off'}]"
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return f" [default: {', '.join(map(str, values))}]"


def _plain(annotation: Any) -> tuple[type, bool, str | None]:
    """Returns the type that typer parses, whether the option is repeatable, and its choices.

    Choices are parsed as strings, because the settings check them with clearer errors.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [member for member in get_args(annotation) if member is not types.NoneType]
    if get_origin(annotation) is tuple:
        kind, _, choices = _plain(get_args(annotation)[0])
        return kind, True, choices
    if get_origin(annotation) is dict:
        return str, False, "JSON"
    if get_origin(annotation) is Literal:
        return str, False, "|".join(map(str, get_args(annotation)))
    return annotation, False, None
