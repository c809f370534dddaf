"""Operations on CPU as C++ (`jax.ffi`), on XLA's own threads.

It is built when the package is installed, where there is a compiler; elsewhere the operations run by plain XLA.
It is registered when this module is imported, because a program kept from an earlier start calls it untraced.
"""

import functools
import hashlib
import importlib
from pathlib import Path

import jax

FEW_ROWS = 8
"""With more rows, XLA multiplies bfloat16 faster where the processor has instructions for it."""

_MODULE = "kernels_pallas.native._handlers"
_OPERATIONS = ("grouped_matmul", "linear", "read_slots", "state_replay", "state_update", "write_slots")


def _register() -> tuple[str | None, frozenset[str]]:
    """Makes the handlers known to XLA; returns why there are none, or None, and which there are."""
    try:
        handlers = importlib.import_module(_MODULE)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == _MODULE
        return "not built when the package was installed" if absent else f"cannot be loaded: {error}", frozenset()
    there = frozenset(name for name in _OPERATIONS if hasattr(handlers, name))
    for name in there:
        jax.ffi.register_ffi_target(target(name), getattr(handlers, name), platform="cpu")
    return None, there


def target(operation: str) -> str:
    """The name by which XLA knows an operation's handler."""
    return f"mamba_jax_{operation}"


WHY_MISSING, _REGISTERED = _register()
"""Why this installation has no native operations; None if it has them."""


def why_not(dtype: str) -> str | None:
    """Why the operations cannot read weights of a dtype; None if they can. The library may be an earlier one."""
    if WHY_MISSING is not None:
        return WHY_MISSING
    known = getattr(importlib.import_module(_MODULE), "DTYPES", "float32 bfloat16").split()
    return None if dtype in known else f"built before it knew {dtype}: install the package again"


def why_missing(operation: str) -> str | None:
    """Why there is no native form of this operation, or None if there is."""
    return WHY_MISSING or (None if operation in _REGISTERED else "not in the library, which is older: install again")


def instructions() -> str | None:
    """The instruction set that products run with: "avx512", "avx2" or "baseline"; None without native operations."""
    return None if WHY_MISSING is not None else getattr(importlib.import_module(_MODULE), "INSTRUCTIONS", "baseline")


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products, by which XLA multiplies many rows; True if unknown.

    It is False with a library that is forced to a smaller instruction set by MAMBA_JAX_INSTRUCTIONS.
    """
    return WHY_MISSING is not None or bool(getattr(importlib.import_module(_MODULE), "MULTIPLIES_BFLOAT16", True))


@functools.cache
def fingerprint() -> str:
    """Identifies the native library that compiled programs depend on, or states why there is none."""
    if WHY_MISSING is not None:
        return WHY_MISSING
    return hashlib.sha256(Path(str(importlib.import_module(_MODULE).__file__)).read_bytes()).hexdigest()
