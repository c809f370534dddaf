"""What the tests of all recurrences share: their operations, sizes, inputs, and the table of implementations.

A recurrence is the linear one, with and without erasing and with decays of heads or of channels, or the selective scan.
Tests take the operations of a shape from here, and what tokens hold (`tokens[:-1]`, and last what is 0 at padding).
"""

import dataclasses
import functools
import itertools

import jax
import model_calls
import model_shapes
import numpy as np
import pytest
from call_checks import check_values, forget, numbers
from model_shapes import DELTA, MAMBA2
from operation_checks import ELSEWHERE, Draw, jitted

from kernels_pallas import native, recurrence, selective_scan
from kernels_pallas.recurrence import reference as recurrence_reference
from kernels_pallas.selective_scan import reference as selective_reference
from mamba_jax.kernel_check.calls import NAMES

SHAPES = [shape.small() for shape in (*MAMBA2, *DELTA, *model_shapes.SELECTIVE)]
MAMBA = next(shape for shape in SHAPES if shape.name == "9 heads, 3 groups")
ERASING, BY_CHANNEL = (shape for shape in SHAPES if shape.name.startswith("6 heads, 3 groups"))
# No model of the library has it: gated linear attention.
LINEAR = dataclasses.replace(BY_CHANNEL, name="6 heads, 3 groups, by channel, linear", erase=False)
SELECTIVE = next(shape for shape in SHAPES if shape.name == "27 channels, states of 5")
ODD = (MAMBA, ERASING, BY_CHANNEL, LINEAR, SELECTIVE)
"""One of each recurrence."""
PUBLISHED = *MAMBA2[:5], *DELTA[:5]
WHOLE = [dataclasses.replace(one, name=f"{one.name}, whole", rows=min(one.rows, 3)) for one in PUBLISHED]
KERNELS = "pallas_tpu_interpreted", "pallas_gpu_interpreted"

FORMS = {
    "scan": ("recurrence_scan", "selective_scan"),
    "sequence": ("recurrence_sequence", "selective_scan_sequence"),
    "update": ("recurrence_update", "selective_update"),
    "replay": ("recurrence_replay", "selective_replay"),
}


def kind(shape):
    """Which recurrence has this shape."""
    if not hasattr(shape, "heads"):
        return "selective"
    return ("erase" if shape.erase else "linear") + ", by channel" * shape.by_channel


def _found(form, shape, linear, selective):
    name, static = FORMS[form], {} if kind(shape) == "selective" else {"erase": shape.erase}
    return getattr(selective, name[1]) if not static else getattr(linear, name[0]), static


def program(form, implementation, shape, *, anew=False, **static):
    """A form of the shape's recurrence compiled, once for all tests but `anew`."""
    operation, recurrence_static = _found(form, shape, recurrence, selective_scan)
    compiled = jitted.__wrapped__ if anew else jitted
    return compiled(operation, implementation=implementation, **recurrence_static, **static)


def plain(form, shape, linear=recurrence, selective=selective_scan, **options):
    """The same as a function to be traced."""
    operation, static = _found(form, shape, linear, selective)
    return functools.partial(operation, **static, **options)


definition = functools.partial(plain, linear=recurrence_reference, selective=selective_reference)
"""The definition of a form of the shape's recurrence."""


def fitting(implementation, shape):
    """The shape with sizes that a kernel's blocks need."""
    if implementation != "pallas_gpu_interpreted":
        return shape
    if kind(shape) == "selective":
        return dataclasses.replace(shape, state=1 << (shape.state - 1).bit_length())
    return dataclasses.replace(shape, head_dim=16, state=32 if shape.state % 16 else shape.state, tile_size=32)


def cases(*implementations, shapes=ODD, lacks=(("native", "selective"),), slow=(), whole=()):
    """Each implementation with each recurrence, but for those in `lacks`, (implementation, kind); some are slow, as are
    published sizes in the form for accelerators: odd sizes have all kinds of grouping. And those of `whole` with each
    size as published.
    """
    found = []
    for implementation, shape in (*itertools.product(implementations, shapes), *itertools.product(whole, WHOLE)):
        if (implementation, kind(shape)) in lacks:
            continue
        marks = [pytest.mark.smoke] if shapes is ODD and "by channel" not in kind(shape) else []
        published = shapes is SHAPES and implementation == ELSEWHERE and "-" in shape.name
        if implementation in slow or published or shape in WHOLE or (shape is LINEAR and implementation in KERNELS):
            marks.append(pytest.mark.slow)
        if implementation == "native":
            missing = native.WHY_MISSING or ("erase" in kind(shape) and not native.has_wide_registers())
            marks.append(pytest.mark.skipif(bool(missing), reason=f"no C++ for {native.instructions()}"))
        name = f"{implementation}, {kind(shape) if shapes is ODD else shape.name}"
        own = shape if shape in WHOLE else fitting(implementation, shape)
        found.append(pytest.param(implementation, own, marks=marks, id=name))
    return pytest.mark.parametrize(("implementation", "shape"), found)


sizes = functools.partial(cases, shapes=SHAPES, slow=KERNELS, whole=("native", "xla", ELSEWHERE))
"""Each implementation with each size; those of kernels and whole ones are slow."""


def entry(draw, shape, *lead, dtype=np.float32):
    """Tokens [*lead]; queries and keys of length 1."""
    return numbers(model_calls.entry(shape, lead, dtype), draw)


def how(draw, shape):
    """The arguments of the recurrence that are arrays: weights of the layer."""
    return {name: value for name, value in numbers(model_calls.fixed(shape), draw).items() if name != "erase"}


def states(draw, shape, count, dtype=np.float32):
    return numbers({"store": model_calls.shape(count, *shape.state_shape, dtype=dtype)}, draw)["store"]


def check_call(form, operation, shape, *given, dtype=None, **options):
    """A form is its definition for these arguments. Returns what it returns. `dtype`: by default that of the tokens."""
    name, values = FORMS[form][kind(shape) == "selective"], numbers(model_calls.fixed(shape), Draw(1))
    values |= dict(zip(NAMES[name].split(), given, strict=True))
    dtype = given[0][0].dtype if dtype is None else dtype
    return check_values(name, values, operation, dtype=given[0][0].dtype, states=dtype, **options)


def tails(shape, count, entries=None, dtype=np.float32, places=None):
    """Inputs of the tokens between each row's anchor and its length; NaN wherever a last tenant's may be."""
    rings = model_calls.tail(dataclasses.replace(shape, rows=count - 1), dtype)
    rings = jax.tree.map(lambda v: model_calls.shape(count, entries or v.shape[1], v.shape[2], dtype=v.dtype), rings)
    tail = numbers({"tail": rings}, Draw(2))["tail"]
    for ring in jax.tree.leaves(tail):
        forget(ring, places, places.anchor_length) if places else ring.fill(np.nan)
    return tail


def pad(tokens, row, start):
    """NaN from token `start` of a row or tile on, with a strength or step size of 0."""
    for v in tokens[:-1]:
        v[row, start:] = np.nan
    tokens[-1][row, start:] = 0


def part(tokens, *index):
    """The tokens at an index of [rows, steps]."""
    return type(tokens)(*(v[index] for v in tokens))
