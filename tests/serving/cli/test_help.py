"""Help pages: what they import, their layout, suggestions, and the version; and how JAX is imported."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mamba_jax
from serving.api.http.settings import ServerSettings
from serving.cli.main import COMMANDS, command, run
from serving.config import EngineConfig

ROOT = Path(__file__).resolve().parents[3]
MAY_IMPORT = {
    # typer and pydantic, with what they need.
    "typer", "click", "shellingham", "annotated_doc", "pydantic", "pydantic_core", "annotated_types",
    "typing_extensions", "typing_inspection", "rich", "colorama",
    # Configuration files.
    "yaml",
    # This project.
    "checkpoints", "serving",
}  # fmt: skip
"""Packages that `--help` of any command may import, the standard library aside."""
PAGES = [[], ["bench"], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["serve", "--help-all"]]
SCRIPT = """
import json, os, sys
before = set(sys.modules)
from serving.cli.main import run
for words in json.loads(sys.argv[1]):
    if not os.fork():
        assert run(words) == 0
        print("\\n" + json.dumps([*set(sys.modules) - before]), end="\\f", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, words
"""


def test_a_page_fits_80_characters_and_imports_only_what_is_listed():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(PAGES)], capture_output=True, text=True, cwd=ROOT, check=True,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert not done.stderr
    for arguments, said in zip(PAGES, done.stdout.removesuffix("\f").split("\f"), strict=True):
        *page, modules = said.splitlines()
        names = {name.split(".")[0] for name in json.loads(modules)} - set(sys.stdlib_module_names)
        assert {name for name in names if not name.startswith(("_", "cython"))} <= MAY_IMPORT, arguments
        assert page[0].startswith("mamba-jax" if arguments == ["--version"] else "Usage: mamba-jax")
        assert max(map(len, page)) <= 80
        assert not re.search(r" <(?!/?think>)[a-z]", "\n".join(page)), "types are written as INTEGER, TEXT, ..."


def test_serve_shows_common_options_and_the_others_on_request(capsys):
    run(["serve", "--help"])
    short = capsys.readouterr().out
    run(["serve", "--help-all"])
    everything = capsys.readouterr().out
    shown = re.findall(r"^  --(?:\[no-\])?([\w-]+)", short, re.MULTILINE)
    assert 20 <= len(shown) <= 30
    assert {"model", "max-model-len", "tensor-parallel-size", "port", "api-key"} <= set(shown)
    classes = EngineConfig, ServerSettings
    assert all(set(settings.COMMON) <= set(settings.model_fields) for settings in classes)
    every = {name.replace("_", "-") for settings in classes for name in settings.model_fields}
    assert every - {"default-sampling"} <= set(re.findall(r"^  --(?:\[no-\])?([\w-]+)", everything, re.MULTILINE))
    hidden = sum(getattr(param, "hidden", False) for param in command("serve").params)
    assert hidden > 70
    assert f"{hidden} more options: mamba-jax serve --help-all" in short
    assert "more options" not in everything


def test_the_version_is_that_of_pyproject(capsys):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert mamba_jax.__version__ == version
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"mamba-jax {version}\n"


PLUGIN = """
import os
os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
os.write(2, b"I0000 00:00:1795405984.437363   14806 cudart_stub.cc:31] Could not find cuda drivers on your machine\\n")
os.write(2, b"something else\\n")
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a driver nothing is dropped")
def test_only_the_plugins_lines_are_dropped(tmp_path):
    """A module in place of JAX writes to the file descriptor, as the libraries of the plugin do."""
    (tmp_path / "jax.py").write_text(PLUGIN)
    folder = tmp_path / "jax_plugins" / "xla_cuda12"
    folder.mkdir(parents=True)
    (folder / "plugin.so").write_text("not a library")
    script = (
        "import sys; from serving.cli.jax_import import import_jax; import_jax()\n"
        "sys.stderr.write('after\\n'); import os; os.write(2, b'end\\n')"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["something else", "after", "end"]
