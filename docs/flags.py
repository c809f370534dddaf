"""Writes the table of engine flags in engine.md from `EngineConfig`, the only place where flags are defined.

python -m docs.flags
"""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from serving.config import EngineConfig

PAGE = Path(__file__).resolve().parent / "engine.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->\n"


def table() -> str:
    """A Markdown table: flag, values, default, meaning."""
    lines = ["| flag | values | default | |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        dashed = name.replace("_", "-")
        if field.annotation is bool or bool in get_args(field.annotation):
            flag, values = f"`--{dashed}`, `--no-{dashed}`", ""
        else:
            flag, values = f"`--{dashed}`", _values(field.annotation)
        default = "" if field.default is None else f"`{field.default}`".lower()
        lines.append(f"| {flag} | {values} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def _values(annotation: Any) -> str:
    union = get_origin(annotation) in (Union, types.UnionType)
    members = [m for m in (get_args(annotation) if union else (annotation,)) if m is not types.NoneType]
    (member,) = members
    if get_origin(member) is Literal:
        return " ".join(f"`{value}`" for value in get_args(member))
    return {int: "a number", float: "a number", str: "text"}[member]


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + table() + END, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
