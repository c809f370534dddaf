"""Compiled programs by the shapes of their arguments.

A program fits arguments of one structure, with leaves of certain shapes, dtypes and placements. Inspecting every leaf
of a store takes about as long as dispatching a step. Therefore the results that replace donated arguments are inspected
once and recognized by their identity afterwards.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Look = tuple[Any, ...]


def look_of(tree: Any) -> Look:
    """The compiler's view of a tree of arrays: its structure, and each leaf's shape, dtype, weak type and sharding.

    Arrays of the host have no placement; for an array on one device, it is the device.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, *[
        # A step's batch is inspected in every step.
        (leaf.shape, leaf.dtype) if type(leaf) is np.ndarray else _look_of_leaf(leaf)
        for leaf in leaves
    ]


def _look_of_leaf(leaf: Any) -> Look:
    place = getattr(leaf, "sharding", None)
    if place is not None and len(place.device_set) == 1:
        (place,) = place.device_set
    return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), place


@dataclass
class _Program:
    compiled: jax.stages.Compiled
    gives: tuple[int, ...] | None = None
    """Shapes and shardings of the results that replace donated arguments; None before the first run."""


class ProgramCache:
    """Compiled programs, each under a name and the forms of its arguments. Safe for several threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._programs: dict[tuple[Hashable, ...], _Program] = {}
        self._looks: dict[Look, int] = {}
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def __iter__(self) -> Iterator[tuple[Hashable, jax.stages.Compiled]]:
        """Returns names and programs."""
        return ((name, program.compiled) for (name, *_), program in self._programs.items())

    def find(
        self, name: Hashable, arguments: tuple[Any, ...], compile: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """Returns the program of this name for such arguments. Calls `compile` if there is none yet."""
        return self._find(name, arguments, compile).compiled

    def run(
        self,
        name: Hashable,
        arguments: tuple[Any, ...],
        compile: Callable[[], jax.stages.Compiled],
        *,
        always: tuple[Any, ...] = (),
        sends: tuple[Any, ...] | None = None,
        donated: int = 0,
    ) -> Any:
        """Runs that program, on `always` and the arguments.

        Args:
            always: arguments that are the same for all programs of this cache.
            sends: the actual arguments, if the program takes another form of the arguments.
            donated: number of results, from the first on, that replace donated arguments.
        """
        program = self._find(name, arguments, compile)
        results = program.compiled(*always, *(arguments if sends is None else sends))
        back = (results,) if donated == 1 and not isinstance(results, tuple) else results[:donated] if donated else ()
        if program.gives is None:
            program.gives = tuple(self._number(look_of(tree)) for tree in back)
        for tree, number in zip(back, program.gives, strict=True):
            self._know(tree, number)
        return results

    def _find(self, name: Hashable, arguments: tuple[Any, ...], compile: Callable[[], jax.stages.Compiled]) -> _Program:
        key = (name, *map(self._look, arguments))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = _Program(compile())
        return program

    def _look(self, tree: Any) -> int:
        known = self._known.get(id(tree))
        return known[1] if known is not None and known[0]() is tree else self._number(look_of(tree))

    def _number(self, look: Look) -> int:
        # Each number is used once, so that two threads cannot assign one number to two forms.
        number = self._looks.get(look)
        return self._looks.setdefault(look, next(self._numbers)) if number is None else number

    def _know(self, tree: Any, number: int) -> None:
        place, known = id(tree), self._known
        known[place] = weakref.ref(tree, lambda _: known.pop(place, None)), number
