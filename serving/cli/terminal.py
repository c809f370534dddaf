"""Terminal output: help pages, and text without control characters.

Help pages have two columns of at most 80 characters, grouped by subject; `--help` shows the common options only.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand

_SHOW_ALL = "serving.cli.terminal.show_all"
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
