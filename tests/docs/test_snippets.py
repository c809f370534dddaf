"""Every Python block of README and documentation runs, in order, and prints what the page says it prints.

The blocks of a page share one namespace. A `text` block that comes next after a `python` block is its output; there,
`...` stands for anything, as in doctests.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import sys
import types
from pathlib import Path

import jax
import pytest

from tests.support.engines.step_programs import few_programs, own_programs
from tests.support.markdown_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if any(block.language == "python" for block in blocks_of(page))
)
QUICK = ("README.md", "docs/engine.md", "docs/guide/1-recurrence.md")
"""Of the others each takes longer; they run with `--full`."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Compiling as users do would take longer than all that the snippets compute. And engines set the cache's place."""
    place = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_disable_most_optimizations", True)
    with few_programs(own_programs):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", place)


def parameter(page: Path):
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=() if name in QUICK else pytest.mark.full)


@pytest.mark.parametrize("page", map(parameter, PAGES))
def test_snippets_run_and_print_what_is_shown(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # snippets may write files
    # A module of its own: classes that a snippet defines look themselves up in theirs.
    module = types.ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)
    blocks = blocks_of(page)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python":
            continue
        # Empty lines in front, so that a traceback names the page's own line.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        if following is not None and following.language == "text":
            shown = printed.getvalue()
            if not doctest.OutputChecker().check_output(following.text, shown, FLAGS):
                lines = difflib.ndiff(following.text.splitlines(), shown.splitlines())
                pytest.fail(f"{page.name}, line {block.line}: prints something else\n" + "\n".join(lines))


def test_the_guide_is_there():
    """Should the pages move, the tests above would pass for want of any."""
    assert len([page for page in PAGES if page.parent.name == "guide"]) >= 6
