#!/usr/bin/env python3
"""Make a virtual environment for this checkout, then run something in it. Needs nothing but Python 3.11 or newer.

    python3 bootstrap.py generate "The quick brown fox"     any `mamba-jax` command
    python3 bootstrap.py test [pytest arguments]            the tests
    python3 bootstrap.py lint                               ruff and mypy
    python3 bootstrap.py python script.py                   a script of yours

The environment is .venv in this folder; it is made anew when pyproject.toml or a native operation has changed.
Set MAMBA_JAX_EXTRAS=cuda (or tpu) for an accelerator build of JAX.
"""

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(extras: set[str]) -> None:
    """Create .venv with the project (editable) and at least `extras`, unless just that has been done already."""
    stamp = VENV / "installed"
    native = sorted((ROOT / "kernels_pallas" / "native").glob("*.[ch]*"))
    built_from = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", ROOT / "setup.py", *native))
    key = hashlib.sha256(built_from + sys.version.encode()).hexdigest()
    have = stamp.read_text().split() if PYTHON.exists() and stamp.exists() else [""]
    fresh = have[0] != key
    if not fresh and extras <= set(have[1:]):
        return
    print(f"Setting up {VENV.name}; the first time takes some minutes ...", file=sys.stderr, flush=True)
    if fresh:
        create()
    extras |= set() if fresh else set(have[1:])
    wanted = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", wanted]
    if subprocess.run(pip).returncode:
        sys.exit("bootstrap: the packages could not be installed (see pip's message above)")
    stamp.write_text(" ".join([key, *sorted(extras)]))


def create() -> None:
    """Make the empty environment, with pip in it."""
    try:
        venv.create(VENV, with_pip=True, clear=True)
    except (subprocess.CalledProcessError, SystemExit):
        # Debian ships Python without ensurepip: let a pip from outside fill the environment, where there is one.
        venv.create(VENV, with_pip=False, clear=True)
        seed = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "pip"]
        if subprocess.run(seed).returncode:
            sys.exit("bootstrap: this Python has neither ensurepip nor pip; install python3-venv and run this again")


def accelerated() -> bool:
    """Whether this machine may have an accelerator: a TPU on its bus, or a GPU's device file."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return (
        sys.platform != "linux"
        or any(Path(name).exists() for name in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
        or any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)
    )


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before any installer has looked
        sys.exit(f"bootstrap: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    command, *rest = arguments
    extras = {name for name in os.environ.get("MAMBA_JAX_EXTRAS", "").split(",") if name}
    install(extras | ({"test"} if command in ("test", "lint") else set()))
    if not accelerated():
        # The tests bring the TPU's compiler, and JAX would look for a TPU with it, in vain and with many words.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    module = [str(PYTHON), "-m"]
    if command == "test":
        commands = [[*module, "pytest", *rest]]
    elif command == "lint":
        commands = [[*module, "ruff", "check"], [*module, "ruff", "format", "--check"], [*module, "mypy"]]
    elif command == "python":
        commands = [[str(PYTHON), *rest]]
    else:
        commands = [[*module, "serving.cli", command, *rest]]
    for line in commands:
        code = subprocess.run(line, cwd=ROOT if command in ("test", "lint") else None).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
