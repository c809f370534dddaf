"""CPU operations in C++ (`jax.ffi`), which run on XLA's threads.

The library is built when the package is installed, if there is a compiler; otherwise the operations use plain XLA.
The handlers are registered when this module is imported, because programs kept from an earlier start call them without
being traced again.
"""

import functools
import hashlib
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp

_MULTIPLY_BFLOAT16 = ("amx_bf16", "avx512_bf16")
_MODULE = "kernels_pallas.native._handlers"
_OPERATIONS = (
    "causal_conv1d",
    "elementwise",
    "grouped_matmul",
    "linear",
    "read_slots",
    "recurrence_replay",
    "recurrence_update",
    "selective_update",
    "write_slots",
)


def _register() -> str | None:
    """Registers the handlers. Returns the reason why there are none, or None."""
    try:
        handlers = importlib.import_module(_MODULE)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == _MODULE
        return "not built when the package was installed" if absent else f"cannot be loaded: {error}"
    if missing := [name for name in _OPERATIONS if not hasattr(handlers, name)]:
        return f"the library is older and lacks {missing[0]}: install the package again"
    for name in _OPERATIONS:
        jax.ffi.register_ffi_target(target(name), getattr(handlers, name), platform="cpu")
    return None


def target(operation: str) -> str:
    """Returns the name under which an operation's handler is registered."""
    return f"mamba_jax_{operation}"


WHY_MISSING = _register()
"""The reason why this installation has no native operations; None if it has them."""


def instructions() -> str | None:
    """Returns the instruction set of C++ products: "amx_bf16", "avx512_bf16", "avx512", "avx2", "baseline" or None."""
    return None if WHY_MISSING is not None else importlib.import_module(_MODULE).INSTRUCTIONS


def operand(x, weight):
    """Returns x [rows, inputs] in the dtype that the C++ products with a weight take: float32, or bfloat16 if both are
    and the processor has an instruction for it. Independent of the number of rows."""
    narrow = x.dtype == weight.dtype == jnp.bfloat16 and x.shape[-1] % 2 == 0 and instructions() in _MULTIPLY_BFLOAT16
    return x if narrow else x.astype(jnp.float32)


def multiplies_bfloat16() -> bool:
    """Returns whether the processor has bfloat16 instructions, which XLA uses for many rows; True if unknown.

    False if MAMBA_JAX_INSTRUCTIONS restricts the library to a smaller instruction set.
    """
    return WHY_MISSING is not None or bool(importlib.import_module(_MODULE).MULTIPLIES_BFLOAT16)


def has_wide_registers() -> bool:
    """Returns whether C++ operations compute with registers of 512 bits."""
    return instructions() not in (None, "avx2", "baseline")


def few_rows() -> int:
    """Returns with how many rows C++ products of bfloat16 are the fastest on a processor with bfloat16 instructions."""
    return 64 if instructions() == "avx512_bf16" else 8


@functools.cache
def fingerprint() -> str:
    """Returns a digest of the native library that compiled programs depend on, or the reason why there is none."""
    if WHY_MISSING is not None:
        return WHY_MISSING
    return hashlib.sha256(Path(str(importlib.import_module(_MODULE).__file__)).read_bytes()).hexdigest()
