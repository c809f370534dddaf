"""What the tests of the linear recurrence's forms share: sizes, inputs, and the table of implementations."""

import dataclasses

import numpy as np
import pytest

from benchmarks.kernels.workloads import DELTA, MAMBA2
from kernels_pallas import native
from kernels_pallas.recurrence import Entry

SHAPES = [shape.small() for shape in (*MAMBA2, *DELTA)]
MAMBA = next(shape for shape in SHAPES if shape.name == "9 heads, 3 groups")
ERASING, BY_CHANNEL = (shape for shape in SHAPES if shape.name.startswith("6 heads, 3 groups"))
# No model of the library has it: gated linear attention.
LINEAR = dataclasses.replace(BY_CHANNEL, name="6 heads, 3 groups, by channel, linear", erase=False)
ODD = (MAMBA, ERASING, BY_CHANNEL, LINEAR)
"""One of each recurrence: with and without erasing, with decays of heads and of channels."""
KERNELS = "pallas_tpu_interpreted", "pallas_gpu_interpreted"


def fitting(implementation, shape):
    """The shape with sizes that a kernel's blocks need."""
    if implementation != "pallas_gpu_interpreted":
        return shape
    return dataclasses.replace(shape, head_dim=16, state=32 if shape.state % 16 else shape.state, tile_size=32)


def cases(*implementations, lacks=()):
    """Each implementation with each recurrence, but for those in `lacks`, (implementation, erase, by_channel)."""
    found = []
    for implementation in implementations:
        for shape in ODD:
            if (implementation, shape.erase, shape.by_channel) in lacks:
                continue
            marks = [pytest.mark.smoke] if not shape.by_channel else []
            if shape is LINEAR and implementation in KERNELS:
                marks.append(pytest.mark.slow)
            if implementation == "native":
                missing = native.WHY_MISSING or (shape.erase and not native.has_wide_registers())
                marks.append(pytest.mark.skipif(bool(missing), reason=f"no C++ for {native.instructions()}"))
            name = f"{implementation}, {'erase' if shape.erase else 'linear'}{', by channel' * shape.by_channel}"
            found.append(pytest.param(implementation, fitting(implementation, shape), marks=marks, id=name))
    return pytest.mark.parametrize(("implementation", "shape"), found)


def sizes(*implementations):
    """Each implementation with each size; those of kernels are slow."""
    found = []
    for implementation in implementations:
        marks = [pytest.mark.slow] if implementation in KERNELS else []
        for shape in SHAPES:
            fitted = fitting(implementation, shape)
            found.append(pytest.param(implementation, fitted, marks=marks, id=f"{implementation}, {shape.name}"))
    return pytest.mark.parametrize(("implementation", "shape"), found)


def entry(draw, shape, *lead, dtype=np.float32):
    """Tokens [*lead]; queries and keys of length 1."""
    heads = (*lead, shape.heads)
    vectors = [draw.normal(*lead, shape.groups, shape.state) for _ in range(2)]
    vectors = [(v / np.sqrt((v**2).sum(-1, keepdims=True))).astype(dtype) for v in vectors]
    decays = (*heads, shape.state) if shape.by_channel else heads
    strength = draw.random.uniform(0.05, 1.9, heads).astype(np.float32)
    return Entry(
        *vectors, draw.normal(*heads, shape.head_dim, dtype=dtype), -draw.positive(*decays, scale=0.3), strength
    )


def how(draw, shape):
    """The arguments of the recurrence that are arrays: the weights of the direct path."""
    return {"skip": None if shape.erase or shape.by_channel else draw.normal(shape.heads)}


def states(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.heads, shape.head_dim, shape.state, dtype=dtype)
    store[0] = np.nan
    return store


def pad(tokens, row, start):
    """NaN from token `start` of a row or tile on, with strength 0."""
    for v in tokens[:-1]:
        v[row, start:] = np.nan
    tokens.strength[row, start:] = 0


def indices(*values):
    """Arrays of indices."""
    return [np.array(v, np.int32) for v in values]
