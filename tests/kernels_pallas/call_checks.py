"""Calls of operations against their definitions: the arguments of `model_calls` with numbers, and places as given."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
from model_calls import BF16, F32, call_of
from operation_checks import Draw, assert_close, assert_same_bits, jitted

from kernels_pallas import causal_conv1d, gated_norm, gated_recurrence, recurrence, selective_scan
from mamba_jax.kernel_check.calls import NAMES, STORES

PARTS = {
    "gated_rms_norm": gated_norm,
    **dict.fromkeys(("causal_conv1d_prefill", "causal_conv1d_update"), causal_conv1d),
    **dict.fromkeys(("gated_scan", "gated_update", "gated_replay"), gated_recurrence),
    **dict.fromkeys(("recurrence_scan", "recurrence_update", "recurrence_replay"), recurrence),
    **dict.fromkeys(("selective_scan", "selective_update", "selective_replay"), selective_scan),
}
"""By operation: the package that has it, and in `reference` its definition by the same name."""


def numbers(arguments, draw=None):
    """A tree of shapes with numbers of the sizes that a model has, by their names, and NaN in slot 0 of stores.

    Places are zeros; what is no shape stays.
    """
    draw = draw or Draw()

    def make(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        first, *_, name = (getattr(key, "name", getattr(key, "key", None)) for key in (path[0], *path))
        found = draw.normal(*leaf.shape, scale=0.2 if (first, name) == ("tail", "key") else 1)
        if first in STORES:
            found[0] = np.nan
        if name in ("query", "key") and first != "tail":
            found /= np.sqrt((found**2).sum(-1, keepdims=True))
        elif name == "strength" and first != "projections":
            found = draw.random.uniform(0.05, 1.9, leaf.shape)
        elif name in ("dt", "log_decay", "a"):
            found = np.abs(found) * {"dt": 0.3, "log_decay": -0.3, "a": -1}[name]
        return found.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(make, arguments)


def forget(ring, places, begin):
    """NaN in a tail's array [tails, entries, channels] wherever no token from `begin` on is."""
    there = np.zeros(ring.shape[:2], bool)
    for which, first, last in zip(places.tail_id, begin, places.length, strict=True):
        there[which, np.arange(first, last) % ring.shape[1]] = True
    ring[~there] = np.nan


def check_values(name, values, implementation, *, padding=None, dtype=F32, states=F32, tolerance=None):
    """An operation on these arguments is its definition, and keeps what the definition keeps. Returns its results.

    Args:
        implementation: its name, or the function compiled by it.
        padding: which leading places of y mean nothing; projections there are NaN, and 0 for the definition.
        tolerance: in float32, of y and of what recurrences compute.
    """
    places, values = NAMES[name].split(), dict(values)
    static = {n: values.pop(n) for n in list(values) if n not in places and not hasattr(values[n], "shape")}
    run = implementation
    if isinstance(run, str):
        run = jitted(getattr(PARTS[name], name), implementation=run, **static)
    projections = [v for v in values.get("projections", ()) if v is not None and padding is not None]

    def arguments(padded):
        for v in projections:
            v[padding] = padded
        return [values[n] for n in places], {n: v for n, v in values.items() if n not in places}

    args, more = arguments(np.nan)
    out = run(*args, **more)
    args, more = arguments(0)
    definition = importlib.import_module(f"{PARTS[name].__name__}.reference")
    want = getattr(definition, name)(*args, **more, **static)
    stores = [n for n in places if n in STORES]
    (y, *after), (want_y, *want_after) = (out, want) if stores else ((out,), (want,))
    real = slice(None) if padding is None else ~padding
    assert y.dtype == dtype
    rounded = BF16 if BF16 in (dtype, states) else F32
    assert_close(y[real], want_y[real], dtype, tolerance if dtype == np.float32 else None)
    for store, ours, theirs in zip(stores, after, want_after, strict=True):
        leaves = (jax.tree_util.tree_leaves_with_path(values[store]), *map(jax.tree.leaves, (ours, theirs)))
        for (path, old), one, other in zip(*leaves, strict=True):
            other = np.asarray(other).astype(old.dtype)
            kept = [slot for slot in range(1, len(old)) if other[slot].tobytes() == old[slot].tobytes()]
            assert_same_bits(one[kept], old[kept])
            erased = static.get("erase") and "value" in jax.tree_util.keystr(path)
            computed = store != "tail" or name == "gated_replay" or erased
            if store == "windows" or not computed:
                assert_same_bits(one[1:], other[1:])
                continue
            nothing = np.isnan(other[1:].astype(np.float32))
            assert (np.isnan(one[1:].astype(np.float32)) == nothing).all()
            one, other = (np.where(nothing, 0, v[1:]) for v in (one, other))
            assert_close(one, other, rounded, tolerance if rounded == np.float32 and "entry" in places else None)
    return y, *after


def check_call(name, shape, implementation, *, dtype=F32, states=F32, given=None, static=None, **options):
    """As `check_values`, of `call_of(name, shape, dtype, states)` with `given` arrays and other arguments."""
    values = numbers(dict(call_of(name, shape, dtype, states, **static or {}).arguments)) | (given or {})
    return check_values(name, values, implementation, dtype=dtype, states=states, **options)
