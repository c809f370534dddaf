"""Command-line options generated from settings classes, help pages, text without control characters, and a check
of files to write.

Help pages have two columns of at most 80 characters, grouped by subject; `--help` shows the common options only.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from serving.config import ConfigError
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
    """Returns the option for a field. Its value is None if it is not required and the command line does not set it."""
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
    if field.is_required():
        return _parameter(name, kind, info, inspect.Parameter.empty)
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
    """Returns the type that typer parses, whether the option is repeatable, and its choices, which settings check."""
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


_SHOW_ALL = "serving.cli.options.show_all"
_METAVARS = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "path": "PATH"}
"""Some versions of typer show types as `<int>` and `<list[int]>`."""
_LONGEST = 78
"""Maximum width of the first column: the page has 80 characters, and rows are indented."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, marks that reverse the direction of text, and lone surrogates."""


class Command(TyperCommand):
    """A command with help that lists its options by group. `--help-all` also shows hidden options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False) and not ctx.meta.get(_SHOW_ALL):
                hidden += 1
                continue
            is_option = param.param_type_name == "option"
            panel = getattr(param, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
            groups.setdefault(panel, []).append(_row(param, ctx))
        if options := groups.pop("Options", None):
            groups["Other options"] = options
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: {ctx.command_path} --help-all")


def show_all(context: typer.Context, value: bool) -> None:
    """The callback of `--help-all`: prints the help with all options, then exits."""
    if value:
        context.meta[_SHOW_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    hidden, param.hidden = getattr(param, "hidden", False), False
    try:
        flag, text = param.get_help_record(ctx) or (param.name, "")
    finally:
        param.hidden = hidden
    if param.param_type_name == "option" and param.secondary_opts:
        flag = f"--[no-]{param.opts[0][2:]}"
    if len(flag) > _LONGEST:  # many choices, which the text lists
        flag = f"{flag.split(' ')[0]} CHOICE"
    return re.sub(r"<(?:list\[)?(int|float|str|path)(?: range)?\]?>", lambda match: _METAVARS[match[1]], flag), text


def printable(text: str) -> str:
    """Returns `text` without control characters. The rest of an escape sequence remains as plain text."""
    return _CONTROLS.sub("", text)


def check_replaceable(option: str, path: Path | None, command: str, is_ours: Callable[[Any], bool]) -> None:
    """Refuses a file that this command has not written before.

    Args:
        option: the option's name.
        path: its value. A device or a pipe may always be written to.
        command: what writes such files.
        is_ours: whether a JSON value is the content of one, or the first line of a file of several.
    """
    if path is None or not (path.is_file() or path.is_dir()):
        return
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(1 << 24)
        value = text.partition("\n")[0] if text.startswith("{") and "\n{" in text else text
        ours = not text or is_ours(json.loads(value))
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError):
        ours = False
    if not ours:
        raise ConfigError(f"{option} {path}: exists and is not a report of `mamba-jax {command}`; give another file")
