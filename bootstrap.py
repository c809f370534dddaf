#!/usr/bin/env python3
"""Creates a virtual environment for this checkout and runs a command in it. Needs only Python 3.11 or newer.

    python3 bootstrap.py generate "The quick brown fox"     any `mamba-jax` command
    python3 bootstrap.py test [pytest arguments]            the tests
    python3 bootstrap.py lint                               ruff and mypy
    python3 bootstrap.py python script.py                   a Python script

The environment is .venv in this folder. It is created again only when pyproject.toml, setup.py, the C++ sources or the
Python version change. Packages are installed with uv if it is on PATH, otherwise with pip.
Set MAMBA_JAX_EXTRAS=cuda (or tpu) for an accelerator build of JAX.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# Builds the editable wheel with the setuptools and jaxlib of .venv: an isolated build would install both once more.
BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"


def install(extras: set[str]) -> None:
    """Creates .venv with the project (editable) and at least `extras`, unless it is up to date."""
    stamp = VENV / "installed"
    key = source_key()
    have = stamp.read_text().split() if PYTHON.exists() and stamp.exists() else [""]
    fresh = have[0] != key
    if not fresh and extras <= set(have[1:]):
        return
    started = time.monotonic()
    if fresh:
        say(f"creating {VENV.name}")
        create()
        say("installing jaxlib and setuptools, which the C++ operations are built with")
        install_packages(build_requirements())
        say("compiling the C++ operations while the other packages are installed")
    else:
        extras = extras | set(have[1:])
        say(f"installing the extras {', '.join(sorted(extras))}")
    build = start_build() if fresh else None
    try:
        install_packages(requirements(extras))
    finally:
        code = build.wait() if build else 0
    if code:
        log = (VENV / "build.log").read_text(errors="replace")
        sys.exit(f"{log}\nbootstrap: the project could not be built (see the messages above)")
    if build:
        [wheel] = (VENV / "wheel").glob("*.whl")
        install_packages(["--no-deps", str(wheel)])
    stamp.write_text(" ".join([key, *sorted(extras)]))
    say(f"set up in {time.monotonic() - started:.0f} s")


def source_key() -> str:
    """A hash of what the environment is made from: sources only, because the build writes its library next to them."""
    native = ROOT / "kernels_pallas" / "native"
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted([*native.glob("*.cc"), *native.glob("*.h")])]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources) + sys.version.encode()).hexdigest()


def project() -> dict:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def build_requirements() -> list[str]:
    """What a build without isolation needs; jaxlib as jax allows it, so that it is installed only once."""
    jax = [name for name in project()["project"]["dependencies"] if name.startswith("jax>")]
    return [*project()["build-system"]["requires"], *jax]


def requirements(extras: set[str]) -> list[str]:
    """The project's dependencies with those of `extras`."""
    table = project()["project"]
    if unknown := extras - table["optional-dependencies"].keys():
        known = ", ".join(sorted(table["optional-dependencies"]))
        sys.exit(f"bootstrap: there is no extra {', '.join(sorted(unknown))}; MAMBA_JAX_EXTRAS may name {known}")
    return [*table["dependencies"], *(line for name in sorted(extras) for line in table["optional-dependencies"][name])]


def create() -> None:
    """Creates the empty environment, with pip in it only if there is no installer outside."""
    with_pip = not (shutil.which("uv") or outer_pip())
    try:
        venv.create(VENV, with_pip=with_pip, clear=True)
    except (subprocess.CalledProcessError, SystemExit):
        sys.exit("bootstrap: this Python has neither ensurepip nor pip; install python3-venv or uv, then try again")


def outer_pip() -> bool:
    """Whether the pip of the running Python can install into another environment (since 22.3)."""
    if importlib.util.find_spec("pip") is None:
        return False
    from pip import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= (22, 3)


def install_packages(packages: list[str]) -> None:
    """Installs into .venv, with uv if that works, otherwise with pip. Byte code is written on first import instead."""
    if shutil.which("uv"):
        if run(["uv", "pip", "install", "--quiet", "--python", str(PYTHON), *packages]) == 0:
            return
        say("uv failed (see its message above); trying pip")
    pip = [str(PYTHON), "-m", "pip", "install"]
    if outer_pip():
        pip = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install"]
    if run([*pip, "--quiet", "--no-compile", "--disable-pip-version-check", *packages]):
        sys.exit("bootstrap: the packages could not be installed (see pip's message above)")


def start_build() -> subprocess.Popen:
    """Starts to build the project's editable wheel into .venv/wheel; its output goes to .venv/build.log."""
    (VENV / "wheel").mkdir()
    with (VENV / "build.log").open("w") as log:
        command = [str(PYTHON), "-c", BUILD, str(VENV / "wheel")]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def run(command: list[str], cwd: Path | None = None) -> int:
    """The exit status of a command that shares this terminal."""
    return subprocess.run(command, cwd=cwd).returncode


def finish(command: list[str], cwd: Path | None) -> int:
    """Runs the last command in place of this process, so that a signal to this process reaches it."""
    if os.name != "posix":
        return run(command, cwd)
    os.chdir(cwd or Path.cwd())
    sys.stdout.flush()
    os.execv(command[0], command)


def say(stage: str) -> None:
    """Prints a line of progress."""
    print(f"bootstrap: {stage}", file=sys.stderr, flush=True)


def accelerated() -> bool:
    """Whether this machine may have an accelerator: a TPU on its PCI bus, or a GPU's device file."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return (
        sys.platform != "linux"
        or any(Path(name).exists() for name in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
        or any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)
    )


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - no installer has checked the version yet
        sys.exit(f"bootstrap: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    command, *rest = arguments
    extras = {name for name in os.environ.get("MAMBA_JAX_EXTRAS", "").split(",") if name}
    install(extras | ({"test"} if command in ("test", "lint") else set()))
    if not accelerated():
        # The extra `test` installs libtpu; without this, JAX looks for a TPU and logs warnings.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Packages are installed without bytecode: compiling their sources in every run would take seconds.
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(VENV / "bytecode"))
    module = [str(PYTHON), "-m"]
    if command == "test":
        commands = [[*module, "pytest", *rest]]
    elif command == "lint":
        commands = [[*module, "ruff", "check"], [*module, "ruff", "format", "--check"], [*module, "mypy"]]
    elif command == "python":
        commands = [[str(PYTHON), *rest]]
    else:
        commands = [[*module, "serving.cli", command, *rest]]
    folder = ROOT if command in ("test", "lint") else None
    for line in commands[:-1]:
        if code := run(line, folder):
            return code
    return finish(commands[-1], folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
