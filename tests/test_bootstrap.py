"""bootstrap.py: which steps it runs, with an installer that only records its calls."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The module from a fresh copy of what it reads; `calls` lists what it would have run."""
    (tmp_path / "kernels_pallas").mkdir()
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "kernels_pallas" / "native", tmp_path / "kernels_pallas" / "native", ignore=ignored)
    for name in ("bootstrap.py", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    spec = importlib.util.spec_from_file_location("bootstrap_copy", tmp_path / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []

    class Build:
        def __init__(self):
            module.calls.append(["build"])
            (module.VENV / "wheel").mkdir()
            (module.VENV / "wheel" / "mamba_jax-0-py3-none-any.whl").touch()
            (tmp_path / "kernels_pallas" / "native" / "_handlers.cpython-311-x86_64-linux-gnu.so").write_bytes(b"built")

        def wait(self):
            return 0

    def run(command, cwd=None):
        module.calls.append(command)
        return module.failures.get(Path(command[0]).name, 0)

    module.failures = {}
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "finish", run)
    monkeypatch.setattr(module, "start_build", Build)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "outer_pip", lambda: True)
    return module


def test_the_second_run_installs_nothing(bootstrap):
    assert bootstrap.main(["generate", "hello"]) == 0
    assert ["build"] in bootstrap.calls
    bootstrap.calls.clear()
    assert bootstrap.main(["generate", "hello"]) == 0
    assert bootstrap.calls == [[str(bootstrap.PYTHON), "-m", "serving.cli", "generate", "hello"]]


def test_bytecode_is_kept_even_where_python_writes_none(bootstrap, monkeypatch):
    """An installation has no bytecode: each run would compile the sources of all packages that it imports."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    assert bootstrap.main(["generate", "hello"]) == 0
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(bootstrap.VENV / "bytecode")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")


@pytest.mark.parametrize("name", ["kernels_pallas/native/dense.cc", "kernels_pallas/native/product.h", "setup.py"])
def test_a_changed_source_is_built_again(bootstrap, name):
    bootstrap.install(set())
    path = bootstrap.ROOT / name
    path.write_text(path.read_text() + "\n")
    bootstrap.calls.clear()
    bootstrap.install(set())
    assert ["build"] in bootstrap.calls


def test_another_extra_is_installed_without_a_build(bootstrap):
    bootstrap.install(set())
    bootstrap.calls.clear()
    bootstrap.install({"plots"})
    [command] = bootstrap.calls
    assert "matplotlib>=3.9" in command
    bootstrap.calls.clear()
    bootstrap.install(set())
    assert bootstrap.calls == []


def test_pip_is_used_if_uv_fails(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    bootstrap.failures = {"uv": 2}
    bootstrap.install_packages(["numpy"])
    assert bootstrap.calls[0][0] == "uv"
    assert "pip" in bootstrap.calls[1]


def test_a_failed_installation_is_an_error_and_is_tried_again(bootstrap):
    bootstrap.failures = {Path(bootstrap.sys.executable).name: 1}
    with pytest.raises(SystemExit, match="could not be installed"):
        bootstrap.install(set())
    bootstrap.failures = {}
    bootstrap.calls.clear()
    bootstrap.install(set())
    assert ["build"] in bootstrap.calls


def test_an_unknown_extra_is_named(bootstrap):
    with pytest.raises(SystemExit, match="no extra cuda99"):
        bootstrap.requirements({"cuda99"})


@pytest.mark.skipif(os.name != "posix", reason="another process cannot be replaced on Windows")
def test_a_signal_reaches_the_command(bootstrap, monkeypatch):
    """`kill` of `bootstrap.py serve` would leave the server running if it were a child process."""
    monkeypatch.undo()
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    bootstrap.finish(["/bin/server", "--port", "0"], None)
    assert started == [["/bin/server", "--port", "0"]]
