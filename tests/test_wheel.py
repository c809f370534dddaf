"""The wheel, installed away from the checkout: what it holds, and that its program runs. Nothing is downloaded."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"checkpoints", "kernels_pallas", "mamba_jax", "serving"}


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; it does not see the checkout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy: setuptools leaves its build folder in the sources, and would put what it finds there into the wheel.
    sources = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.name == "LICENSE" or path.suffix in (".toml", ".md", ".py"):
            shutil.copy(path, sources)
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')", cwd=sources)
    [wheel] = sources.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def home(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel. Its dependencies are the ones that are installed here."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    [packages] = home.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    run(home / "bin/python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=home)
    return home


def test_it_holds_the_packages_and_nothing_else(wheel):
    names = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_it_is_what_the_environment_imports(home, package):
    found = run(home / "bin/python", "-c", f"import {package}; print({package}.__file__)", cwd=home)
    assert Path(found.strip()).is_relative_to(home)


def test_generate(home):
    said = run(home / "bin/mamba-jax", "generate", "The state of", "--max-tokens=8", "--no-warmup", cwd=home)
    assert said.strip()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("reuse --conversations=2 --turns=2 --modes=all --blocks=256 --concurrency=2", "ratio"),
        ("decode demo --batches=1 --prefill=64 --crowd= --reps=1", "metric"),
    ],
)
def test_bench(home, command, expected):
    lines = run(home / "bin/mamba-jax", "bench", *command.split(), cwd=home).splitlines()
    assert any(expected in json.loads(line) for line in lines)
