"""Whether a test has replaced something that programs follow from, so that none may be taken from disk."""

import sys
import types
from typing import Any
from unittest import mock

import pytest

NOT_TRACED = {"_pytest", *sys.stdlib_module_names} - {"builtins"}
"""Packages of which no function of a test is traced."""
ON_HOST = "serving.engine.assembly.build", "serving.engine.steps.batching", "serving.state_transfer.source"
"""Modules of other packages of which none is."""
replaced: set[int] = set()
"""Identities of those that have replaced something else, and have not undone it."""


def count_replacements() -> None:
    """From now on `replaced` tells what pytest's and Python's tools have replaced."""
    for name in ("setattr", "delattr", "setitem", "delitem", "setenv", "delenv"):
        _count(pytest.MonkeyPatch, name, lambda self, target, *_: target)
    _forget(pytest.MonkeyPatch, "undo")
    for kind, target in ((mock._patch, lambda self: self.getter()), (mock._patch_dict, lambda self: self.in_dict)):
        _count(kind, "__enter__", target)
        _forget(kind, "__exit__")


def _count(kind: Any, name: str, target: Any) -> None:
    replace = getattr(kind, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _may_be_traced(target(self, *args)):
            replaced.add(id(self))
        return replace(self, *args, **kwargs)

    setattr(kind, name, counted)


def _forget(kind: Any, name: str) -> None:
    undo = getattr(kind, name)

    def undone(self: Any, *args: Any) -> Any:
        replaced.discard(id(self))
        return undo(self, *args)

    setattr(kind, name, undone)


def _may_be_traced(target: Any) -> bool:
    if isinstance(target, types.ModuleType):
        target = target.__name__
    elif not isinstance(target, str):
        target = (target if isinstance(target, type) else type(target)).__module__
    return target.partition(".")[0] not in NOT_TRACED and not target.startswith(ON_HOST)
