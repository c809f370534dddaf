"""The split's settings as command-line options, made from the settings so that they are defined in one place only."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

_PANEL = "Prefill/decode split"


def with_options(
    command: Callable[..., None], settings: type[BaseModel], name: str, *, panel: str = _PANEL
) -> Callable[..., None]:
    """Gives a command options for the fields of `settings` in place of its keyword `name`, which gets those given."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = {field: given.pop(field) for field in settings.model_fields}
        command(**given, **{name: {field: value for field, value in options.items() if value not in (None, [])}})

    added = [_option(field, info, panel) for field, info in settings.model_fields.items()]
    found = [*(p for p in parameters if p.name != name), *added]
    wrapped.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in found}
    return wrapped


def _option(name: str, info: Any, panel: str) -> inspect.Parameter:
    kind, many, choices = _plain(info.annotation)
    dashed = name.replace("_", "-")
    option = typer.Option(
        f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}",
        help=f"{info.description}{_default(info)}",
        rich_help_panel=panel,
        show_default=False,
        metavar=choices,
    )
    annotation: Any = Annotated[list[kind] | None if many else kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(info: Any) -> str:
    if info.is_required() or info.default in (None, ()):
        return ""
    said = ", ".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
    return f" [dim]\\[default: {said}][/dim]"


def _plain(annotation: Any) -> tuple[type, bool, str | None]:
    """What the command line parses, whether it may be given several times, and the choices that it has."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [member for member in get_args(annotation) if member is not types.NoneType]
    if get_origin(annotation) is tuple:
        kind, _, choices = _plain(get_args(annotation)[0])
        return kind, True, choices
    if get_origin(annotation) is Literal:
        return str, False, "|".join(map(str, get_args(annotation)))
    return annotation, False, None
