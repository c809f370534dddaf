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
from model_shapes import DELTA, MAMBA2
from operation_checks import ELSEWHERE, Draw, assert_close, assert_in_place, assert_same_bits, jitted

from kernels_pallas import native, recurrence, selective_scan
from kernels_pallas.recurrence import Entry
from kernels_pallas.recurrence import reference as recurrence_reference
from kernels_pallas.selective_scan import SelectiveEntry
from kernels_pallas.selective_scan import reference as selective_reference

LINEAR_SHAPES = [shape.small() for shape in (*MAMBA2, *DELTA)]
SHAPES = [*LINEAR_SHAPES, *(shape.small() for shape in model_shapes.SELECTIVE)]
MAMBA = next(shape for shape in SHAPES if shape.name == "9 heads, 3 groups")
ERASING, BY_CHANNEL = (shape for shape in SHAPES if shape.name.startswith("6 heads, 3 groups"))
# No model of the library has it: gated linear attention.
LINEAR = dataclasses.replace(BY_CHANNEL, name="6 heads, 3 groups, by channel, linear", erase=False)
SELECTIVE = next(shape for shape in SHAPES if shape.name == "27 channels, states of 5")
ODD = (MAMBA, ERASING, BY_CHANNEL, LINEAR, SELECTIVE)
"""One of each recurrence."""
KERNELS = "pallas_tpu_interpreted", "pallas_gpu_interpreted"
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.dtype("bfloat16")], ids=["float32", "bfloat16"])

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


def plain(form, shape, **options):
    """The same as a function to be traced."""
    operation, static = _found(form, shape, recurrence, selective_scan)
    return functools.partial(operation, **static, **options)


def definition(form, shape):
    """The definition of a form of the shape's recurrence."""
    operation, static = _found(form, shape, recurrence_reference, selective_reference)
    return functools.partial(operation, **static)


def fitting(implementation, shape):
    """The shape with sizes that a kernel's blocks need."""
    if implementation != "pallas_gpu_interpreted":
        return shape
    if kind(shape) == "selective":
        return dataclasses.replace(shape, state=1 << (shape.state - 1).bit_length())
    return dataclasses.replace(shape, head_dim=16, state=32 if shape.state % 16 else shape.state, tile_size=32)


def cases(*implementations, shapes=ODD, lacks=(("native", "selective"),), slow=()):
    """Each implementation with each recurrence, but for those in `lacks`, (implementation, kind); some are slow, as are
    published sizes in the form for accelerators: odd sizes have all kinds of grouping.
    """
    found = []
    for implementation, shape in itertools.product(implementations, shapes):
        if (implementation, kind(shape)) in lacks:
            continue
        marks = [pytest.mark.smoke] if shapes is ODD and "by channel" not in kind(shape) else []
        published = shapes is SHAPES and implementation == ELSEWHERE and "-" in shape.name
        if implementation in slow or published or (shape is LINEAR and implementation in KERNELS):
            marks.append(pytest.mark.slow)
        if implementation == "native":
            missing = native.WHY_MISSING or ("erase" in kind(shape) and not native.has_wide_registers())
            marks.append(pytest.mark.skipif(bool(missing), reason=f"no C++ for {native.instructions()}"))
        name = f"{implementation}, {kind(shape) if shapes is ODD else shape.name}"
        found.append(pytest.param(implementation, fitting(implementation, shape), marks=marks, id=name))
    return pytest.mark.parametrize(("implementation", "shape"), found)


sizes = functools.partial(cases, shapes=SHAPES, slow=KERNELS)
"""Each implementation with each size; those of kernels are slow."""


def entry(draw, shape, *lead, dtype=np.float32):
    """Tokens [*lead]; queries and keys of length 1."""
    if kind(shape) == "selective":
        x, b, c = (draw.normal(*lead, n, dtype=dtype) for n in (shape.inner, shape.state, shape.state))
        return SelectiveEntry(x, b, c, draw.positive(*lead, shape.inner, scale=0.3))
    heads = (*lead, shape.heads)
    vectors = [draw.normal(*lead, shape.groups, shape.state) for _ in range(2)]
    vectors = [(v / np.sqrt((v**2).sum(-1, keepdims=True))).astype(dtype) for v in vectors]
    decays = (*heads, shape.state) if shape.by_channel else heads
    strength = draw.random.uniform(0.05, 1.9, heads).astype(np.float32)
    return Entry(
        *vectors, draw.normal(*heads, shape.head_dim, dtype=dtype), -draw.positive(*decays, scale=0.3), strength
    )


def how(draw, shape):
    """The arguments of the recurrence that are arrays: weights of the layer."""
    if kind(shape) == "selective":
        return {"a": -draw.positive(shape.state, shape.inner), "d": draw.normal(shape.inner)}
    return {"skip": None if shape.erase or shape.by_channel else draw.normal(shape.heads)}


def states(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, *shape.state_shape, dtype=dtype)
    store[0] = np.nan
    return store


def check_call(form, operation, shape, tokens, store, places, dtype=None, tolerance=None):
    """A scan or an update is its definition, and keeps slots that it does not write. Returns what it returns.

    `dtype`: whose rounding decides, by default that of the tokens; `tolerance`: for float32.
    """
    options, dtype = how(Draw(1), shape), tokens[0].dtype if dtype is None else dtype
    y, after = operation(tokens, store, places, **options)
    want_y, want = definition(form, shape)(tokens, store, places, **options)
    assert y.dtype == tokens[0].dtype
    tolerance = tolerance if dtype == np.float32 else None
    assert_close(y, want_y, dtype, tolerance)
    assert_close(after[1:], want[1:], dtype, tolerance)
    untouched = np.setdiff1d(np.arange(len(store)), places.write_slot)
    assert_same_bits(after[untouched], store[untouched])
    return y, after


def check_in_place(form, implementation, shape, tokens, slots_of, *tail, size=4_000_000):
    """A form updates a large store, and a tail, in place; `slots_of(slots)` gives the places in a store of so many."""
    one = states(Draw(), shape, 1, tokens[0].dtype)
    store = np.zeros((size // one.size, *one.shape[1:]), one.dtype)

    def run(donated, tokens, places, options):
        y, *after = plain(form, shape, implementation=implementation)(tokens, *donated, places, **options)
        return after, y

    assert_in_place(run, (store, *tail), tokens, slots_of(len(store)), how(Draw(1), shape))


def tails(shape, count, entries=None, dtype=np.float32):
    """Tails full of a last tenant's entries, which are NaN wherever a test does not fill them."""
    rings = model_calls.tail(dataclasses.replace(shape, rows=count - 1), dtype)
    return jax.tree.map(lambda v: np.full((count, entries or v.shape[1], v.shape[2]), np.nan, v.dtype), rings)


def fill(draw, tail, places):
    """Inputs of the tokens between each row's anchor and its length."""
    make = {
        "value": draw.normal,
        "key": functools.partial(draw.normal, scale=0.2),
        "log_decay": lambda n: -draw.positive(n, scale=0.3),
        **dict.fromkeys(("strength", "dt"), functools.partial(draw.positive, scale=0.3)),
    }
    for which, a, c in zip(places.tail_id, places.anchor_length, places.length, strict=True):
        for n in range(a, c):
            for name, ring in tail._asdict().items():
                if ring is not None:
                    ring[which, n % ring.shape[1]] = make.get(name, draw.normal)(ring.shape[2]).astype(ring.dtype)
    return tail


def pad(tokens, row, start):
    """NaN from token `start` of a row or tile on, with a strength or step size of 0."""
    for v in tokens[:-1]:
        v[row, start:] = np.nan
    tokens[-1][row, start:] = 0


def part(tokens, *index):
    """The tokens at an index of [rows, steps]."""
    return type(tokens)(*(v[index] for v in tokens))


def indices(*values):
    """Arrays of indices."""
    return [np.array(v, np.int32) for v in values]
