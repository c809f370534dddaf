"""Settings as command-line options, generated from the settings so that they are defined in one place."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

_PANEL = "Prefill/decode split"


def with_options(
    command: Callable[..., None],
    settings: type[BaseModel],
    name: str,
    *,
    panel: str = _PANEL,
    without: Collection[str] = (),
) -> Callable[..., None]:
    """Replaces a command's keyword `name` by options for the fields of `settings`; `name` receives those given.

    `without` names fields that get no option.
    """
    names = [field for field in settings.model_fields if field not in without]
    parameters = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        options = {field: given.pop(field) for field in names}
        command(**given, **{name: {field: value for field, value in options.items() if value not in (None, [])}})

    added = [_option(field, settings.model_fields[field], panel) for field in names]
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
    if info.is_required() or info.default in (None, ()) or "Unset:" in info.description:
        return ""
    said = ", ".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
    return f" [dim]\\[default: {said}][/dim]"


def _plain(annotation: Any) -> tuple[type, bool, str | None]:
    """The type that typer parses, whether the option is repeatable, and its choices."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [member for member in get_args(annotation) if member is not types.NoneType]
    if get_origin(annotation) is tuple:
        kind, _, choices = _plain(get_args(annotation)[0])
        return kind, True, choices
    if get_origin(annotation) is Literal:
        return str, False, "|".join(map(str, get_args(annotation)))
    return annotation, False, None
