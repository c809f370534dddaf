"""Identity of weights and sources: equal digests mean that states of one process can be used by another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

from mamba_jax.config import HybridConfig
from mamba_jax.sharding.axis import settled

PROGRAM_PACKAGES = ("kernels_pallas", "mamba_jax")
"""Those that define the programs of a step."""
STATE_PACKAGES = ("checkpoints", *PROGRAM_PACKAGES)
"""The packages that determine the content of a state: they read weights and compute with them."""
_SEEDS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


def model_digest(model: nnx.Module, config: HybridConfig) -> str:
    """A digest of a model that has been made in memory: its configuration, and every value of every weight."""
    weights = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return combined(repr(config), {path: array_digest(value) for path, value in weights.items()}, weights)


def combined(before: str, digests: Mapping[str, Array], arrays: Mapping[str, Any]) -> str:
    """Returns one digest of a text and of named arrays."""
    found = hashlib.sha256(before.encode())
    for path, digest in sorted(jax.device_get(dict(digests)).items()):
        found.update(f"\n{path} {arrays[path].dtype} {tuple(arrays[path].shape)} ".encode() + digest.tobytes())
    return found.hexdigest()[:32]


def array_digest(values: Shaped[Array, "*sizes"]) -> UInt32[Array, 4]:
    """128 bits that depend on every value and its position, however the array is divided over devices.

    It reads the array once where it lies: to copy the weights to the host and hash them there would take seconds for
    each update of a large model. The mixing function is MurmurHash3's: good against accidents, not against people who
    choose the weights, who decide what the model says anyway.
    """
    return settled(_digest(values))


@jax.jit
def _digest(values: Shaped[Array, "*sizes"]) -> UInt32[Array, 4]:
    words = _words(values)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += index * np.uint32(stride % (1 << 32))
        stride *= words.shape[axis]
    place = _mixed(position + np.uint32(1))
    sums = [jnp.sum(_mixed(_mixed(words ^ place * seed) + place), dtype=jnp.uint32) for seed in _SEEDS]
    return jnp.stack(sums)


def _words(values: Shaped[Array, "*sizes"]) -> UInt32[Array, "*words"]:
    """The bits of each value; one axis more for values of more than 32 bits."""
    if values.dtype == jnp.bool_:
        return values.astype(jnp.uint32)
    bits = jnp.finfo(values.dtype).bits if jnp.issubdtype(values.dtype, jnp.floating) else jnp.iinfo(values.dtype).bits
    whole = jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{min(bits, 32)}"))
    return whole.astype(jnp.uint32)


def _mixed(word: UInt32[Array, "*words"]) -> UInt32[Array, "*words"]:
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


@cache
def source_digest(packages: tuple[str, ...]) -> str:
    """SHA-256 of every Python file and compiled extension of packages: other sources may compute other results."""
    digest = hashlib.sha256()
    for package in packages:
        root = Path(str(files(package)))
        for path in sorted(each for each in root.rglob("*") if each.suffix in (".py", ".so")):
            text = path.read_bytes()
            digest.update(f"{package}/{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()
