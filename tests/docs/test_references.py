"""Documentation that is tied to the program: engine flags, commands, links, and the site that is built of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from docs.flags import TABLES, with_table
from serving.api.http.settings import _DEFAULTS, ServerSettings
from serving.cli.main import app
from serving.config import EngineConfig
from serving.hosts.settings import HostSettings
from serving.split.settings import RouterSettings, SplitSettings
from tests.support.markdown_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM = typer.main.get_command(app)


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


def commands_of_the_demo() -> list[str]:
    """Those of the script that trains the demo model."""
    text = (ROOT / "benchmarks/demo.sh").read_text().replace("\\\n", " ")
    draft = re.search(r"^draft=\((.*)\)$", text, re.MULTILINE)[1]
    return re.findall(r"(?:^|\|\| )(mamba-jax .*)", text.replace('"${draft[@]}"', draft), re.MULTILINE)


COMMANDS = [(page.name, line) for page in PAGES for line in commands_of(page)]
COMMANDS += [("demo.sh", line) for line in commands_of_the_demo()]


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


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    assert set(navigation) == {page for page in pages if not page.startswith("decisions/")}


@pytest.mark.full
def test_the_site_builds_without_warnings(tmp_path):
    """Its links out of docs/ lead to the repository."""
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert "/blob/main/benchmarks/RESULTS.md" in (tmp_path / "site/operations/index.html").read_text()


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "exposure.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
SETTINGS = (ServerSettings, RouterSettings, SplitSettings, HostSettings, EngineConfig)
DEFAULTS = {name: field.default for kind in SETTINGS for name, field in kind.model_fields.items()} | _DEFAULTS
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "h": 3600}
BOUNDS = {
    "levels of arrays": "serving.api.http.json_values: MAX_DEPTH",
    "values of log-probabilities": "serving.api.http.generation: MAX_VALUES",
    "bytes of routed experts": "serving.api.http.generation: MAX_EXPERT_BYTES",
    "stop strings": "serving.engine.requests.sampling_params: MAX_STOP_CHARACTERS MAX_STOP_IDS",
    "`n` of a prompt": "serving.engine.requests.sampling_params: MAX_CHOICES",
    "entries of `logit_bias`": "mamba_jax.sampling.table: MAX_LOGIT_BIAS MAX_PROMPT_LOGPROB_IDS",
    "marks of a request": "serving.core.cache.retention: MAX_MARKS LONGEST_TTL",
    "conversations that are": "serving.engine.requests.conversations: _CLIENTS _CONVERSATIONS _MESSAGES",
    "texts of a key": "serving.api.http.text: _THREADS",
    "time for which a key keeps": "serving.core.cache.eviction_queue: ABSENT_SECONDS",
    "CPU time of a first trial": "serving.engine.structured.trials: QUICK_SECONDS",
    "CPU time of one mask in a trial": "serving.engine.structured.grammar_trial: MASK_SECONDS",
    "grammars that wait": "serving.engine.structured.trials: _WAITING _WAITING_OF_CLIENT",
    "characters of a grammar": "serving.engine.structured.grammar_trial: LONGEST",
    "calls in an answer": "serving.api.http.parsing.grammars: MOST_CALLS _MOST",
    "names of adapters": "serving.api.http.endpoints.updates: MAX_ADAPTERS",
    "time to read an adapter": "serving.engine.requests.adapter_reads: READ_SECONDS",
    "adapters that are read": "serving.engine.requests.adapter_reads: MAX_READS MAX_THREADS",
    "bytes of a JSON file": "checkpoints.json_file: MOST_JSON",
    "time to read new weights": "serving.engine.async_engine: READ_WEIGHTS_SECONDS",
    "states that requests to a decode worker": "serving.split.decode_side: MAX_EXPECTED",
    "prefill workers that a decode": "serving.split.http.routes: _MAX_PEERS",
    "routers that follow": "serving.split.http.events: MOST_READERS",
    "states that a router takes": "serving.split.router.event_followers: MOST_STATES _LONGEST",
    "bytes of a message between hosts": "serving.hosts.link: MAX_FRAME",
}


def numbers(cell):
    """The numbers of a cell, in bytes, seconds or pieces."""
    found = re.findall(r"([0-9][0-9,]*(?:\.[0-9]+)?)(?: (KiB|MiB|GiB|h)\b)?", cell)
    return {float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found}


@pytest.mark.parametrize("begin", BOUNDS)
def test_bounds_are_those_of_the_code(begin):
    (row,) = [row for row in ROWS if row[0].startswith(begin)]
    module, _, names = BOUNDS[begin].partition(":")
    assert {getattr(import_module(module), name) for name in names.split()} <= numbers(row[1]), row


@pytest.mark.parametrize("row", [row for row in ROWS if "--" in "".join(row[2:3])], ids=lambda row: row[0][:40])
def test_defaults_of_flags_are_stated(row):
    for flag in re.findall(r"`--([a-z-]+)`", row[2].partition(";")[0]):
        default = DEFAULTS[flag.replace("-", "_")]
        assert default is None or default in numbers(row[1]), (flag, default, row[1])


def test_every_flag_that_bounds_something_is_there():
    servers = {name for kind in SETTINGS[:-1] for name in kind.model_fields}
    bounds = {name for name in servers if name.startswith("max_") or name.endswith(("_timeout", "_bytes"))}
    assert not {name for name in bounds if f"--{name.replace('_', '-')}`" not in PAGE}
