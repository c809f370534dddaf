"""Documentation that is tied to the program: engine flags, commands, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from docs.flags import TABLES, with_table
from serving.cli.main import app
from serving.config import EngineConfig
from tests.support.markdown_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = typer.main.get_command(app)


def test_every_engine_flag_is_in_the_table():
    page = (ROOT / "docs/engine.md").read_text()
    missing = [flag for flag in EngineConfig.model_fields if f"| `--{flag.replace('_', '-')}`" not in page]
    assert not missing, "run: python -m docs.flags"


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_flags_are_current(name):
    page = (ROOT / "docs" / name).read_text()
    assert with_table(name, page) == page, "run: python -m docs.flags"


def commands_of(page: Path) -> list[str]:
    """Each `mamba-jax ...` line of a page's shell blocks, continued lines joined."""
    text = "".join(block.text for block in blocks_of(page) if block.language in ("bash", "sh", "shell"))
    lines = text.replace("\\\n", " ").splitlines()
    for prefix in ("python3 bootstrap.py ", "mamba-jax "):
        lines = [re.sub(rf"^{prefix}", "mamba-jax ", line.strip()) for line in lines]
    own = ("mamba-jax test", "mamba-jax lint", "mamba-jax python")  # of the bootstrap script
    return [line for line in lines if line.startswith("mamba-jax ") and not line.startswith(own)]


COMMANDS = [(page.name, line) for page in PAGES for line in commands_of(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:60]}" for page, line in COMMANDS])
def test_the_command_line_knows_what_pages_show(page, line):
    _, *words = shlex.split(re.split(r"\s(?:\||>|&)", line, maxsplit=1)[0], comments=True)
    command, context = PROGRAM, typer.Context(PROGRAM, info_name="mamba-jax")
    while hasattr(command, "commands"):
        name, *words = words
        command = command.get_command(context, name)
        assert command is not None, f"{page}: there is no command {name!r}"
        context = typer.Context(command, info_name=name, parent=context)
    if not command.context_settings.get("ignore_unknown_options"):  # those parse their words themselves
        command.parse_args(context, words)


def links_of(page: Path) -> list[str]:
    """Links to files of the repository, without their fragments."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [file for link in links if not re.match(r"[a-z]+:", link) if (file := link.split("#")[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not [link for link in links_of(page) if not (page.parent / link).exists()]


def test_every_page_is_linked():
    linked = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    decisions = ROOT / "docs/decisions"
    others = [page for page in PAGES if page.name not in ("README.md", "index.md") and page.parent != decisions]
    assert not [page.name for page in others if page not in linked]
