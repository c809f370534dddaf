"""The wheel, installed away from the checkout: what it holds, and that its program runs. Nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import tarfile
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
def sources(tmp_path_factory) -> Path:
    # A copy: setuptools leaves its build folder in the sources, and would put what it finds there into the wheel.
    sources = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in ROOT.iterdir():
        if path.name in ("LICENSE", "MANIFEST.in") or path.suffix in (".toml", ".md", ".py"):
            shutil.copy(path, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources) -> Path:
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')", cwd=sources)
    [wheel] = sources.glob("*.whl")
    return wheel


def files_of(sources: Path) -> set[str]:
    """The files of the packages that are not compiled: modules, and data such as tables and weights."""
    files = (path for package in PACKAGES for path in (sources / package).rglob("*") if path.is_file())
    return {str(path.relative_to(sources)) for path in files if path.suffix not in (".pyc", ".cc", ".h", ".so")}


@pytest.fixture(scope="module")
def home(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel. Its dependencies are the ones that are installed here."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    [packages] = home.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    options = ("--quiet", "--no-index", "--no-deps", "--ignore-installed")
    run(home / "bin/python", "-m", "pip", "install", *options, wheel, cwd=home)
    return home


def test_it_holds_the_packages_and_nothing_else(wheel):
    names = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


def test_it_holds_every_module_and_data_file(sources, wheel):
    assert files_of(sources) <= set(ZipFile(wheel).namelist())


def test_it_is_what_the_environment_imports(home):
    program = "; ".join(f"import {package}; print({package}.__file__)" for package in sorted(PACKAGES))
    found = run(home / "bin/python", "-c", program, cwd=home).splitlines()
    assert [Path(path).parent.name for path in found] == sorted(PACKAGES)
    assert all(Path(path).is_relative_to(home) for path in found)


def test_without_native_operations_the_wheel_is_for_every_platform(sources, monkeypatch):
    monkeypatch.setenv("MAMBA_JAX_NO_NATIVE", "1")
    shutil.rmtree(sources / "build", ignore_errors=True)
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('pure')", cwd=sources)
    [wheel] = (sources / "pure").glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in ZipFile(wheel).namelist() if name.endswith((".so", ".cc", ".h"))]


def test_the_source_distribution_holds_the_files_and_what_the_native_operations_are_built_from(sources):
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('.')", cwd=sources)
    [archive] = sources.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[-1] for name in files.getnames()}
    native = ROOT / "kernels_pallas" / "native"
    assert {f"kernels_pallas/native/{path.name}" for path in native.iterdir() if path.suffix in (".cc", ".h")} <= names
    assert files_of(sources) <= names


def test_generate(home):
    said = run(home / "bin/mamba-jax", "generate", "The state of", "--max-tokens=8", "--no-warmup", cwd=home)
    assert said.strip()
