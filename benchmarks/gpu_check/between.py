"""What lies between a layer's projections in decode, compared with XLA."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.sizes import BF16, Sizes, compare
from benchmarks.kernels.call import Draw
from benchmarks.kernels.calls import OPERATIONS, drawn


def check_between(name: str, sizes: Sizes, copy: float, deadline: Deadline, *, erase: bool = False) -> bool:
    """The operation `name` at the first of its published sizes of recurrences that erase or do not; with small ones if
    kernels are interpreted.
    """
    ok, operation = True, OPERATIONS[name]
    first = next(shape for shape in operation.shapes if shape.erase == erase)
    first = first.small() if sizes.interpret else first
    for steps, rows in deadline.each(name, itertools.product(sizes.steps, sizes.rows)):
        call = drawn(name, dataclasses.replace(first, rows=rows, steps=steps), Draw(BF16))

        def run(*arrays: Any, call: Any = call, implementation: str) -> tuple[Any, jax.Array]:
            return call.program(implementation)(*arrays)

        ok &= compare(
            name, sizes, run, ["xla"], partial(jax.tree.map, jnp.copy, call.stores), (call.inputs, call.places),
            rows=rows, steps=steps, moved=call.moved, copy=copy,
        )  # fmt: skip
    return ok
