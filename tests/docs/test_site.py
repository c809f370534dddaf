"""The documentation's site builds without warnings, and its links out of docs/ lead to the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", config, flags=re.MULTILINE)) == {
        page for page in pages if not page.startswith("decisions/")
    }


@pytest.mark.full
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert "/blob/main/benchmarks/RESULTS.md" in (tmp_path / "site/operations/index.html").read_text()
