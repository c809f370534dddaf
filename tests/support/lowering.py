"""One MLIR context for many programs. To make and free one takes half of the time that a small program takes when it is
read from the cache; JAX makes one for each program, and has no setting for it."""

import sys
import threading

PROGRAMS = 100
"""Of one context, which holds what they consist of, constants included, until it is replaced."""
_kept = threading.local()


def share_contexts() -> None:
    """Has each thread lower many programs in one context, if JAX is imported and makes contexts where 0.10 does."""
    mlir = sys.modules.get("jax._src.interpreters.mlir")
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return

    def shared() -> object:
        _kept.left = getattr(_kept, "left", 0) - 1
        if _kept.left < 0:
            _kept.context, _kept.left = make(), PROGRAMS - 1
        return _kept.context

    mlir.make_ir_context = shared  # type: ignore[union-attr]


def forget_contexts() -> None:
    """Frees this thread's context as soon as its programs are dropped."""
    vars(_kept).clear()
