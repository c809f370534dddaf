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
from benchmarks.kernels.calls import OPERATIONS, Draw


def check_between(name: str, sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """The operation `name` at the first of its published sizes; with small ones if kernels are interpreted."""
    ok, operation = True, OPERATIONS[name]
    first = operation.shapes[0].small() if sizes.interpret else operation.shapes[0]
    for steps, rows in deadline.each(name, itertools.product(sizes.steps, sizes.rows)):
        call = operation.call(Draw(BF16), dataclasses.replace(first, rows=rows, steps=steps))
        # The interval of a replay is no array.
        places = {name: value for name, value in call.options.items() if isinstance(value, jax.Array)}
        static = {name: value for name, value in call.options.items() if name not in places}
        operate = partial(call.run, **static)

        def run(stores: Any, args: Any, places: Any, *, operate: Any = operate, **how: Any) -> tuple[Any, jax.Array]:
            y, stores = operate(*args, stores, **places, **how)
            return stores, y

        ok &= compare(
            name, sizes, run, ["xla"], partial(jax.tree.map, jnp.copy, call.store), (call.args, places),
            rows=rows, steps=steps, moved=call.moved, copy=copy,
        )  # fmt: skip
    return ok
