"""Tests of kernels that need not run again: nothing that they follow from has changed since they passed.

These are the tests of `kernels_pallas` and of programs compiled for TPUs and GPUs that are not of the default tier. A
result follows from the test's file, from the project's files that it imports, and from the versions of Python, JAX and
the compilers. `.ci/passed.json` has these versions, and a digest of the others for each file whose tests have passed.
This writes it:

    python3 bootstrap.py test -n 3 --full --record-passes tests/kernels_pallas tests/serving/capacity

`--skip-recorded`, which `.ci/run` uses, skips the tests of a file with the same digest. With other versions it skips
none, and the head of pytest's output says which they are.
"""

import functools
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSED = ROOT / ".ci" / "passed.json"
REASON = "nothing has changed since its pass in .ci/passed.json"
PACKAGES = "kernels_pallas|mamba_jax|checkpoints|serving|tests"
NAMED = re.compile(rf"\b(?:{PACKAGES})(?:\.\w+)+")
"""A module of the project, also one that is imported by its name in a string."""
IMPORT = re.compile(rf"\bfrom ((?:{PACKAGES})[\w.]*) import (\([^)]*\)|.*)")
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
LIBRARIES = ("flax", "numpy")


def skip_recorded(items: list[pytest.Item]) -> None:
    """Mark the tests that have passed before as skipped."""
    passed = {} if other_versions() else _recorded().get("files", {})
    for item in items:
        if _of_kernels(item) and passed.get(file := str(item.path.relative_to(ROOT))) == digest(ROOT, file):
            item.add_marker(pytest.mark.skip(reason=REASON))


def other_versions() -> str:
    """What there is another version of than when the passes were recorded."""
    recorded, now = _recorded().get("versions", {}), _versions()
    return ", ".join(f"{name} {now[name]} (recorded: {was})" for name, was in recorded.items() if was != now[name])


def _recorded() -> dict[str, dict[str, str]]:
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def _versions() -> dict[str, str]:
    """Of compilers the whole versions, of others without the number of fixes."""
    python = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    others = {name: ".".join(_version(name).split(".")[:2]) for name in LIBRARIES}
    return python | {name: _version(name) for name in COMPILERS} | others


def _of_kernels(item: pytest.Item) -> bool:
    marked = {name for name in ("tier_1", "slow", "tpu_compile", "gpu_compile") if item.get_closest_marker(name)}
    return not marked & {"tier_1", "slow"} and ("kernels_pallas" in item.path.parts or bool(marked))


class PassRecorder:
    """Records the files of a run in which every test passes."""

    def __init__(self, config: pytest.Config) -> None:
        chosen = config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args)
        if chosen or not config.option.full:
            raise pytest.UsageError("--record-passes needs --full and whole files, without -k, -m and names of tests")
        self._files: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files.add(report.nodeid.split("::")[0])

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.OK:
            return
        before = {} if other_versions() else _recorded().get("files", {})
        passed = before | {file: digest(ROOT, file) for file in self._files}
        there = {file: passed[file] for file in sorted(passed) if (ROOT / file).exists()}
        PASSED.write_text(json.dumps({"versions": _versions(), "files": there}, indent=1) + "\n")


@functools.cache
def digest(root: Path, test_file: str) -> str:
    """Of the files that a test file follows from."""
    value = hashlib.sha256()
    for path in sorted(_sources(root, root / test_file)):
        value.update(f"\n{path.relative_to(root)} {_digest_of_file(path)}".encode())
    return value.hexdigest()


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _sources(root: Path, test_file: Path) -> set[Path]:
    """The kernels, the test's file, the helpers that it names, what they and pytest import for it, and data.

    Data are all files but Python's in the folders of these, such as the C++ sources. Kernels import kernels only.
    """
    folders = [folder for folder in test_file.parents if folder.is_relative_to(root)]
    words = set(re.findall(r"\w+", test_file.read_text()))
    helpers = (path for path in test_file.parent.glob("*.py") if path.stem in words and path.stem[:5] != "test_")
    queue = [test_file, *helpers, *(path for folder in folders if (path := folder / "conftest.py").exists())]
    found = {*queue, *(root / "kernels_pallas").rglob("*.py")}
    while queue:
        new = set(_imported(root, queue.pop())) - found
        found |= new
        queue += new
    data = {path for folder in {path.parent for path in found} - {root} for path in folder.iterdir() if _is_data(path)}
    return found | data | {path for path in [root / "pyproject.toml"] if path.exists()}


def _is_data(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".py", ".pyc", ".so", ".md")


@functools.cache
def _imported(root: Path, path: Path) -> frozenset[Path]:
    text = path.read_text()
    if path.name == "conftest.py":  # what its fixtures import is for the default tier, or is imported by a test too
        text = "\n".join(re.findall(r"^(?:from|import) .*", text, re.MULTILINE))
    return frozenset(file for name in _names(text) for file in _files_of(root, name))


def _names(text: str) -> Iterator[str]:
    """Yields the modules that a file names, and what it imports from them, which may be modules too."""
    yield from NAMED.findall(text)
    for module, names in IMPORT.findall(text):
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))


def _files_of(root: Path, module: str) -> Iterator[Path]:
    """Yields the files that importing a module runs; none for a name that is not a module."""
    path = root
    for part in module.split("."):
        path /= part
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


@functools.cache
def _digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
